import socket

import pytest
from huggingface_hub import HfApi

from angelspec.core.network import transport_errors


def test_the_client_s_failure_to_connect_is_among_them():
    """Whatever HTTP library the installed huggingface_hub uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(transport_errors()):
        HfApi(endpoint=f"http://127.0.0.1:{port}").model_info("org/name", timeout=5)


def test_other_errors_are_not():
    assert not issubclass(ValueError, transport_errors())
