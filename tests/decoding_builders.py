"""Targets of a handful of tokens, and proposers whose proposals a test chooses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from angelspec.core.geometry import TargetGeometry
from angelspec.core.modes import mode_family
from angelspec.decoding.proposer import Proposals
from angelspec.targets import grouped_attention
from angelspec.targets.target import Target


def small_target(*, vocab_size=32, seed=0, sharpness=3.0, num_layers=2, stop_token=1) -> Target:
    """A random llama of ``vocab_size`` tokens in float32, on the real ``Target``."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=False, eos_token_id=stop_token, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config._attn_implementation = grouped_attention.register()
        model = LlamaForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # large weights: a token depends on all before it, and few are likely
                torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight.data *= sharpness
    return Target(
        name="small", folder=Path("/nonexistent"), digest=f"small-{vocab_size}-{seed}-{sharpness}", model=model,
        tokenizer=SimpleNamespace(eos_token_id=stop_token), geometry=TargetGeometry.from_config(config.to_dict()),
        family=mode_family("plain"),
    )  # fmt: skip


class ScriptedProposer:
    """Proposes what ``script(history) -> tokens`` says, and checks the loop's side of the protocol meanwhile.

    Features and last hidden states are compared, as they arrive, with one forward's over each row's whole history.
    """

    name = "scripted"

    def __init__(self, script, *, depth, target=None, layer_ids=()):
        self.script, self.depth, self.target, self.layer_ids = script, depth, target, layer_ids
        self.checked_features = 0

    @property
    def identity(self):
        return {"kind": "scripted", "depth": self.depth}

    def start(self, num_rows, *, capacity):
        self.seen = [None] * num_rows
        self.capacity = capacity

    def reset(self, rows):
        for row in rows.tolist():
            self.seen[row] = []

    def observe(self, rows, observed):
        for index, row in enumerate(rows.tolist()):
            count = int(observed.counts_B[index])
            assert observed.positions_BT[index, :count].tolist() == list(
                range(len(self.seen[row]), len(self.seen[row]) + count)
            ), "positions must follow what was observed"
            self.seen[row] += observed.tokens_BT[index, :count].tolist()
            assert len(self.seen[row]) <= self.capacity
            if self.layer_ids:
                whole = self.target.forward(torch.tensor([self.seen[row]]), layer_ids=self.layer_ids)
                for arrived, true in (
                    (observed.taps_BTF, whole.taps_BTF),
                    (observed.hidden_BTD, whole.hidden_BTD),
                ):
                    torch.testing.assert_close(arrived[index, :count], true[0, -count:], atol=1e-4, rtol=1e-4)
                self.checked_features += count

    def propose(self, rows, *, histories, last_token_B, position_B):
        tokens_BK = torch.full((len(rows), self.depth), -7)  # padding that is no token
        confidence_BK = torch.full((len(rows), self.depth), 0.5)
        lengths_B = torch.zeros(len(rows), dtype=torch.int64)
        for index, (row, history) in enumerate(zip(rows.tolist(), histories, strict=True)):
            assert self.seen[row] == list(history)[:-1], "all but the anchor must have been observed"
            assert (last_token_B[index], position_B[index]) == (history[-1], len(history) - 1)
            proposal = list(self.script(list(history)))[: self.depth]
            tokens_BK[index, : len(proposal)] = torch.tensor(proposal, dtype=torch.int64)
            lengths_B[index] = len(proposal)
        return Proposals(tokens_BK, confidence_BK, lengths_B)


def random_prompts(count, *, vocab_size, seed=0, longest=9):
    """Distinct prompts of 1 to ``longest`` tokens, none of them the stop token 1."""
    generator = torch.Generator().manual_seed(seed)
    prompts = {}
    while len(prompts) < count:
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        prompt = torch.randint(2, vocab_size, (length,), generator=generator).tolist()
        prompts[tuple(prompt)] = prompt
    return list(prompts.values())
