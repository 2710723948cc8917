"""Servers with certificates of a private CA: the settings that trust it, and what is not trusted."""

from __future__ import annotations

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import _http
from support.command_line import ckpt
from support.internals import Client, parse
from support.object_stores import environment
from support.stores_on_loopback import PATIENCE, asked_by_writer
from support.tls import Authority, encrypted
from support.web_server import web_server

from ckpttools import StorageError
from ckpttools.stores.certificates import VARIABLES, added_certificates, bundle_path
from ckpttools.stores.web import https
from ckpttools.stores.web.hub_errors import trust_certificates
from ckpttools.stores.web.hub_repository import Repository

SCHEMES = ("s3", "gs", "az", "https", "hf")
EXTRA = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def web():
    with web_server() as web:
        web.files |= {"x/config.json": b"{}", "hub/org/model/config.json": b"{}"}
        yield web


@pytest.fixture(scope="module")
def fronts(authority, web, gcs_server):
    """TLS before both servers: host and port."""
    with (
        encrypted(web.address, authority.context()) as files,
        encrypted(gcs_server.url.removeprefix("http://"), authority.context()) as objects,
    ):
        yield {"objects": objects, "web": files}


@pytest.fixture(autouse=True)
def fresh(web, gcs_server, fronts, monkeypatch, tmp_path):
    """Nobody trusts anything but the system's CAs; stores know nothing yet."""
    gcs_server.put("bucket", f"{tmp_path.name}/config.json", b"{}")
    monkeypatch.setitem(fronts, "name", tmp_path.name)
    with asked_by_writer(web, monkeypatch, tmp_path):
        for name in (*VARIABLES, "SSL_CERT_DIR"):
            monkeypatch.delenv(name, raising=False)
        name_hub(monkeypatch, f"https://{fronts['web']}")
        monkeypatch.setattr(https, "STORE", https.HttpsStore())
        https.STORE.client = Client(PATIENCE)
        monkeypatch.setattr("ckpttools.stores.objects.client.FIRST_RETRIES", 0)
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT", None)
        with environment(**clouds(fronts["objects"])):
            yield
    _http.close_session()


def name_hub(monkeypatch, url):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def clouds(address: str, scheme: str = "https") -> dict[str, str]:
    """An environment in which all clouds are at one address."""
    url = f"{scheme}://{address}"
    return {
        "STORAGE_EMULATOR_HOST": url,
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_SKIP_SIGNATURE": "true",
        "AZURE_STORAGE_ENDPOINT": f"{url}/azure",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_SKIP_SIGNATURE": "true",
    }


def location(scheme, fronts):
    names = {"https": f"https://{fronts['web']}/x", "hf": "hf://org/model"}
    return names.get(scheme, f"{scheme}://bucket/{fronts['name']}")


def refused(scheme, fronts) -> StorageError:
    with pytest.raises(StorageError) as caught:
        (parse(location(scheme, fronts)) / "config.json").read_bytes()
    return caught.value


class TestTrustedServers:
    @pytest.mark.parametrize("variable", VARIABLES)
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_stores_honor_every_certificate_variable(self, authority, fronts, monkeypatch, scheme, variable):
        monkeypatch.setenv(variable, str(authority.path))
        assert (parse(location(scheme, fronts)) / "config.json").read_bytes() == b"{}"

    @pytest.mark.parametrize("scheme", ["gs", "https"])
    def test_stores_honor_certificate_directory(self, authority, fronts, monkeypatch, tmp_path, scheme):
        (tmp_path / "certificates").mkdir()
        (tmp_path / "certificates" / "own.pem").write_bytes(authority.path.read_bytes())
        (tmp_path / "certificates" / "README").write_bytes(b"\xff no certificate")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "certificates"))
        assert (parse(location(scheme, fronts)) / "config.json").read_bytes() == b"{}"

    @pytest.mark.parametrize("variable", EXTRA)
    def test_hub_requests_honor_certificate_variables(self, authority, web, fronts, monkeypatch, variable):
        """Both are requests of huggingface_hub."""
        monkeypatch.setenv(variable, str(authority.path))
        store = parse("hf://org/model").store
        store.fetch([store.open("org/model/config.json")], lambda done, total: None)
        assert store.open("org/model/config.json").read(0, 2) == b"{}"
        url = f"https://{fronts['web']}"
        # The hub answers with the address of the new repository.
        monkeypatch.setattr(web, "address", fronts["web"])
        Repository(store.client, url, "me/new", "main", store.headers, "hf://me/new").create(private=True)
        assert web.hub.private["me/new"]

    def test_client_set_by_the_program_is_kept(self, authority, monkeypatch):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.path))
        monkeypatch.setattr(_http, "_GLOBAL_CLIENT_FACTORY", list)
        trust_certificates()
        assert _http._GLOBAL_CLIENT_FACTORY is list

    def test_certificates_are_added_only_where_libraries_ignore_variables(self, authority, monkeypatch):
        assert added_certificates() == "" and bundle_path() is None
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        assert added_certificates() == "" and bundle_path() == str(authority.path)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.path))
        assert added_certificates() == ""
        monkeypatch.delenv("SSL_CERT_FILE")
        assert added_certificates() in authority.path.read_text()
        monkeypatch.setenv("AWS_CA_BUNDLE", "of boto3")
        assert bundle_path() is None


class TestUntrustedServers:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_unknown_authority_error_names_settings(self, fronts, scheme):
        error = refused(scheme, fronts)
        assert "a certificate of an unknown certificate authority (CA)" in error.got, error
        assert all(name in error.hint for name in VARIABLES), error
        done = ckpt("inspect", "tree", location(scheme, fronts))
        assert done.exit_code == 5 and "SSL_CERT_FILE" in done.output, done.output

    @pytest.mark.parametrize("scheme", ["gs", "https"])
    def test_certificate_error_names_trusted_files(self, fronts, monkeypatch, tmp_path, scheme):
        other = Authority(tmp_path, "another CA")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(other.path))
        error = refused(scheme, fronts)
        assert f"trusted now, besides the system's: AWS_CA_BUNDLE={other.path}" in error.got, error

    @pytest.mark.parametrize(
        ("scheme", "kind", "got", "hint"),
        [
            ("gs", "expired", "not valid now", "clock"),
            ("https", "expired", "not valid now", "clock"),
            ("gs", "another name", "for another host name", "host name"),
            ("https", "another name", "for another host name", "host name"),
            # OpenSSL trusts a certificate that the settings name, whatever it is for.
            ("gs", "CA", "a certificate of a CA in place of a server certificate", "CA:FALSE"),
        ],
    )
    def test_other_tls_errors_are_not_reported_as_unknown_authority(
        self, authority, web, fronts, monkeypatch, gcs_server, scheme, kind, got, hint
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
        address = web.address if scheme == "https" else gcs_server.url.removeprefix("http://")
        with encrypted(address, authority.context(kind)) as front, environment(**clouds(front)):
            error = refused(scheme, {**fronts, "web": front})
        assert got in error.got and hint in error.hint, error

    @pytest.mark.parametrize("scheme", ["s3", "gs", "https", "hf"])
    def test_server_without_tls_is_reported(self, web, fronts, gcs_server, monkeypatch, scheme):
        name_hub(monkeypatch, f"https://{web.address}")
        with environment(**clouds(gcs_server.url.removeprefix("http://"))):
            error = refused(scheme, {**fronts, "web": web.address})
        assert error.got.startswith("a response without TLS") and "http://" in error.hint, error

    @pytest.mark.parametrize("scheme", ["gs", "https"])
    @pytest.mark.parametrize("variable", VARIABLES)
    def test_setting_without_certificates_is_refused(self, fronts, monkeypatch, tmp_path, scheme, variable):
        for path, content in ((tmp_path / "absent", None), (tmp_path / "empty", b"\xff\n")):
            if content:
                path.write_bytes(content)
            monkeypatch.setenv(variable, str(path))
            error = refused(scheme, fronts)
            assert f"the certificates that {variable} names cannot be used" in error.message
            assert error.location == str(path) and f"unset {variable}" in error.hint

    def test_hub_errors_name_unknown_authority(self, authority, fronts, monkeypatch):
        monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
        store = parse("hf://org/model").store
        with monkeypatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(authority.path))
            file = store.open("org/model/config.json")
        with pytest.raises(StorageError, match="the certificate of the Hub is not trusted") as caught:
            store.fetch([file], lambda done, total: None)
        assert "SSL_CERT_FILE" in caught.value.hint
        url = f"https://{fronts['web']}"
        repository = Repository(store.client, url, "me/new", "main", store.headers, "hf://me/new")
        with pytest.raises(StorageError, match="the certificate of the Hub is not trusted"):
            repository.create(private=True)

    def test_plain_http_ignores_certificate_settings(self, web, monkeypatch, tmp_path):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent"))
        assert (parse(f"http://{web.address}/x") / "config.json").read_bytes() == b"{}"
