"""Both supported major versions of huggingface_hub are tested: `make` says which one each environment is for."""

from __future__ import annotations

import os

import huggingface_hub
import pytest

EXPECTED = os.environ.get("ANGELSPEC_HUB_MAJOR")


@pytest.mark.skipif(EXPECTED is None, reason="ANGELSPEC_HUB_MAJOR is not set")
def test_this_environment_has_the_major_version_that_it_is_for():
    assert huggingface_hub.__version__.split(".")[0] == EXPECTED, "make it anew: make clean"
