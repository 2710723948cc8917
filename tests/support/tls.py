"""A certificate authority of its own, and TLS before a server on loopback that speaks plain HTTP."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_DAY = timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class Authority:
    """A certificate authority (CA), made anew.

    Attributes:
        path: its certificate, in PEM format.
    """

    def __init__(self, directory: Path, name: str = "ckpttools test CA") -> None:
        self._directory, self._name = directory, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        built = self._certificate(self._name, self._key.public_key(), datetime.now(UTC) + _DAY, is_ca=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(built.public_bytes(_PEM))
        self._own = self._written(built, self._key, "own")

    def context(self, kind: str = "valid") -> ssl.SSLContext:
        """Settings of a server whose certificate is valid, "expired", for "another name", or of the "CA"."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._own if kind == "CA" else self._issued(kind))
        return context

    def _issued(self, kind: str) -> Path:
        key, subject = ec.generate_private_key(ec.SECP256R1()), _name("server")
        until = datetime.now(UTC) + (-timedelta(hours=1) if kind == "expired" else _DAY)
        host = "elsewhere.example" if kind == "another name" else "localhost"
        return self._written(self._certificate(subject, key.public_key(), until, host), key, kind)

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        until: datetime,
        host: str = "localhost",
        *,
        is_ca: bool = False,
    ) -> x509.Certificate:
        names: list[x509.GeneralName] = [x509.DNSName(host)]
        names += [x509.IPAddress(ip_address("127.0.0.1"))] * (host == "localhost")
        return (
            x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number())
            .not_valid_before(until - 2 * _DAY)
            .not_valid_after(until)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(is_ca, None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )

    def _written(self, built: x509.Certificate, key: ec.EllipticCurvePrivateKey, name: str) -> Path:
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path = self._directory / f"{name} with key.pem"
        path.write_bytes(built.public_bytes(_PEM) + secret)
        return path


@contextmanager
def encrypted(address: str, context: ssl.SSLContext) -> Iterator[str]:
    """TLS before a server: host and port at which it answers.

    Args:
        address: host and port of the server.
        context: settings, as of `Authority.context`.
    """
    host, _, port = address.partition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def accept() -> None:
            while not ended.is_set():
                with suppress(OSError):
                    plain, _ = listener.accept()
                    threading.Thread(target=serve, args=(plain,), daemon=True).start()

        def serve(plain: socket.socket) -> None:
            # Clients that do not trust the certificate end the handshake.
            with (
                suppress(OSError),
                plain,
                socket.create_connection((host, int(port))) as inner,
                context.wrap_socket(plain, server_side=True) as outer,
            ):
                down = threading.Thread(target=_pump, args=(inner, outer), daemon=True)
                down.start()
                _pump(outer, inner)
                down.join()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"localhost:{listener.getsockname()[1]}"
        finally:
            ended.set()
            with suppress(OSError):
                socket.create_connection(listener.getsockname()).close()
            thread.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
