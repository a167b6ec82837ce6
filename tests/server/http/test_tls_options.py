"""TLS options that cannot work end the start."""

from __future__ import annotations

import os

import pytest

from aiakq.arguments.server import checked
from aiakq.errors import AiakqError
from aiakq.server.http.http_server import check_tls


def test_unknown_ciphers_are_refused_at_the_start(tmp_path):
    (tmp_path / "cert.pem").touch()
    given = {"ssl_certfile": str(tmp_path / "cert.pem")}
    check_tls(checked({**given, "ssl_ciphers": "ECDHE+AESGCM"}, server=True))
    with pytest.raises(AiakqError, match="--ssl-ciphers is 'NOTHING'"):
        check_tls(checked({**given, "ssl_ciphers": "NOTHING"}, server=True))
    with pytest.raises(AiakqError, match="no --ssl-certfile"):
        check_tls(checked({"ssl_ciphers": "ECDHE+AESGCM"}, server=True))


@pytest.mark.parametrize("option", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_pipe_in_place_of_a_certificate_is_not_waited_for(tmp_path, option):
    (tmp_path / "cert.pem").touch()
    os.mkfifo(tmp_path / "pipe")
    given = {"ssl_certfile": str(tmp_path / "cert.pem"), option: str(tmp_path / "pipe")}
    with pytest.raises(AiakqError, match="named pipe"):
        check_tls(checked(given, server=True))
