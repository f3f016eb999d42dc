"""Files are replaced whole, and paths are read as a shell reads them."""

from __future__ import annotations

from pathlib import Path

from angelspec.core.files import expanded, write_text_atomic


def test_a_tilde_is_the_home_of_a_user_or_a_letter(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert expanded("~/drafters/x") == Path("/somewhere/drafters/x")
    assert expanded("~nobody-of-this-name/x") == Path("~nobody-of-this-name/x")
    assert expanded(Path("plain/x")) == Path("plain/x")


def test_a_file_keeps_its_permissions_and_a_link_its_place(tmp_path):
    private, link = tmp_path / "private.yaml", tmp_path / "link.yaml"
    private.write_text("old")
    private.chmod(0o600)
    link.symlink_to(private)
    write_text_atomic(link, "new")
    assert link.is_symlink() and private.read_text() == "new"
    assert private.stat().st_mode & 0o777 == 0o600
    write_text_atomic(tmp_path / "folder" / "fresh", "text")
    assert (tmp_path / "folder" / "fresh").stat().st_mode & 0o777 == 0o644
