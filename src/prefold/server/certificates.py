"""Certificates for https, looked at before the model loads: what is wrong with which file."""

from __future__ import annotations

import ssl
from pathlib import Path


class _Encrypted(Exception):
    """The key cannot be read without a pass phrase."""


def check_certificates(keyfile: str, certfile: str, ca_certs: str | None) -> None:
    """Raises:
    ValueError: a file cannot be read or does not hold what it should; names the option and the file.
    """
    named = {"--ssl-certfile": certfile, "--ssl-keyfile": keyfile}
    if ca_certs is not None:
        named["--ssl-ca-certs"] = ca_certs
    for option, file in named.items():
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise ValueError(f"{option} {file} cannot be read: {error.strerror}") from None
        if option != "--ssl-keyfile" and not _holds_certificate(file):
            raise ValueError(f"{option} {file} holds no certificate in PEM form")
    try:
        # Without a function for the pass phrase OpenSSL would ask for it at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, _refuse)
    except _Encrypted:
        message = f"--ssl-keyfile {keyfile} is encrypted; `openssl pkey -in {keyfile}` writes it decrypted"
        raise ValueError(message) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"--ssl-keyfile {keyfile} is not the key of --ssl-certfile {certfile}") from None
        raise ValueError(f"--ssl-keyfile {keyfile} holds no private key in PEM form") from None


def _holds_certificate(file: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError:
        return False
    return True


def _refuse() -> str:
    raise _Encrypted
