"""Who asks a store, and how: credentials that fail, permissions that are missing, servers of another API."""

from __future__ import annotations

import json

import pytest
from support.command_line import ckpt, run
from support.gcs_server import Fault
from support.internals import parse
from support.locations import HF
from support.object_stores import Google, environment
from support.tls import Authority, encrypted

from ckpttools import StorageError
from ckpttools.stores.objects import gs

KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "x"}
PAGE = "<!doctype html>\n<title>404 Not Found</title>\n<h1>Not Found</h1>"


def error_body(code: str, message: str = "") -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


@pytest.fixture
def clouds(gcs_server):
    """All clouds at one server, which keeps the objects of a bucket of its own, and its faults."""
    gcs_server.reset()
    url = gcs_server.url
    account = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "aGVsbG8="}
    own = Google(gcs_server)
    own.put({"x.bin": b"1234"})
    with environment(
        STORAGE_EMULATOR_HOST=url,
        AWS_ENDPOINT_URL=url,
        AZURE_STORAGE_ENDPOINT=f"{url}/azure",
        **KEYS,
        **account,
    ):
        yield own
    gcs_server.reset()


def refused(location) -> StorageError:
    with pytest.raises(StorageError) as caught:
        location.entries()
    return caught.value


AUTHENTICATION = [
    ("s3", 403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
    ("s3", 403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
    ("s3", 403, "RequestTimeTooSkewed", "correct the clock"),
    ("s3", 403, "RequestExpired", "correct the clock"),
    ("s3", 400, "ExpiredToken", "get new credentials"),
    ("s3", 400, "TokenRefreshRequired", "get new credentials"),
    ("s3", 400, "InvalidToken", "aws configure"),
    ("s3", 401, "", "aws configure"),
    ("az", 403, "AuthenticationFailed", "az login"),
    ("az", 400, "InvalidAuthenticationInfo", "az login"),
    ("az", 401, "NoAuthenticationInformation", "az login"),
    ("az", 403, "KeyBasedAuthenticationNotPermitted", "az login"),
    ("gs", 401, "AuthenticationRequired", "gcloud auth"),
    ("gs", 401, "", "gcloud auth"),
]
PERMISSION = [
    ("s3", "AccessDenied", "s3:ListBucket"),
    ("s3", "AllAccessDisabled", "s3:ListBucket"),
    ("az", "AuthorizationPermissionMismatch", "Storage Blob Data Reader"),
    ("az", "AuthorizationFailure", "Storage Blob Data Reader"),
    ("gs", "AccessDenied", "storage.objects.list"),
    ("gs", "UserProjectAccountProblem", "storage.objects.list"),
]


class TestRefused:
    @pytest.mark.parametrize("message", ["", "Some words of the server."])
    @pytest.mark.parametrize(("scheme", "status", "code", "hint"), AUTHENTICATION)
    def test_failed_authentication_is_not_reported_as_missing_permission(
        self, clouds, scheme, status, code, hint, message
    ):
        body = error_body(code, message) if code else ""
        clouds.server.faults.append(Fault("GET", count=9, status=status, body=body))
        error = refused(parse(f"{scheme}://{clouds.bucket}/d"))
        assert error.message.endswith(": authentication failed")
        assert str(status) in error.got and code in error.got and "asked as" in error.got
        assert (message in error.got) == bool(code) or not message
        assert hint in error.hint and "permission " not in (error.expected or "").split("checked")[0]

    @pytest.mark.parametrize(("scheme", "code", "permission"), PERMISSION)
    def test_missing_permission_is_not_reported_as_invalid_key(self, clouds, scheme, code, permission):
        clouds.server.faults.append(Fault("GET", count=9, status=403, body=error_body(code, "No.")))
        error = refused(parse(f"{scheme}://{clouds.bucket}/d"))
        assert error.message.endswith(": not allowed")
        assert f"403 Forbidden, {code}: No." in error.got and permission in error.expected
        assert scheme == "gs" or error.hint.startswith("grant that permission to these credentials")

    @pytest.mark.parametrize(
        ("code", "message"),
        [
            ("InvalidAccessKeyId", "authentication failed"),
            ("SignatureDoesNotMatch", "authentication failed"),
            ("AccessDenied", "not allowed"),
        ],
    )
    def test_missing_error_code_is_requested(self, clouds, code, message):
        clouds.server.faults += [
            Fault("HEAD", count=9, status=403),
            Fault("GET .*x.bin", count=9, status=403, body=error_body(code)),
        ]
        bucket, _ = parse(f"s3://{clouds.bucket}/x.bin").store._at(f"{clouds.bucket}/x.bin")
        with pytest.raises(StorageError, match=message) as caught:
            bucket.head("x.bin")
        assert caught.value.got.startswith(f"403 Forbidden, {code}; asked as")

    @pytest.mark.parametrize("kind", ["HEAD", "HEAD|GET"])
    def test_refusal_without_code_names_both_reasons(self, clouds, kind):
        clouds.server.faults.append(Fault(kind, count=9, status=403))
        bucket, _ = parse(f"s3://{clouds.bucket}/x.bin").store._at(f"{clouds.bucket}/x.bin")
        with pytest.raises(StorageError, match="not allowed") as caught:
            bucket.head("x.bin")
        assert "403 Forbidden, without an error code" in caught.value.got
        assert caught.value.expected.startswith("valid credentials, and the permission s3:GetObject")

    def test_wrong_region_is_reported_as_such(self, clouds):
        body = error_body("AuthorizationHeaderMalformed", "the region 'x' is wrong; expecting 'eu'")
        clouds.server.faults.append(Fault("GET", count=9, status=400, body=body))
        assert "AWS_REGION" in refused(parse(f"s3://{clouds.bucket}/d")).hint


MALFORMED = [
    ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "not base64!"}, "Invalid Access Key"),
    ("az", {"AZURE_STORAGE_SAS_TOKEN": "nonsense", "AZURE_STORAGE_ACCOUNT_KEY": ""}, "SAS"),
    ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": "not json"}, "Unable to decode"),
    ("gs", {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}, "Unable to decode"),
    ("gs", {"GOOGLE_SERVICE_ACCOUNT": "/nonexistent"}, "Unable to open"),
    (
        "gs",
        {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(
                {"client_email": "a@b", "private_key": "x", "private_key_id": "y"}
            )
        },
        "pem",
    ),
]
UNPRINTABLE = [
    ("s3", "AWS_ACCESS_KEY_ID", "AKIA\n"),
    ("s3", "AWS_SECRET_ACCESS_KEY", "secret\r\n"),
    ("s3", "AWS_SESSION_TOKEN", "a\nb"),
    ("s3", "AWS_REGION", "eu\n"),
    ("az", "AZURE_STORAGE_TOKEN", "a\tb"),
    ("az", "AZURE_STORAGE_ACCOUNT_NAME", "account\n"),
    ("az", "AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=\n"),
    ("gs", "GOOGLE_BEARER_TOKEN", "token\n"),
]


class TestMalformed:
    @pytest.mark.parametrize(("scheme", "variables", "got"), MALFORMED)
    def test_malformed_credentials_are_reported(self, clouds, scheme, variables, got):
        values = {**KEYS, "AZURE_STORAGE_ACCOUNT_NAME": "account", **variables}
        with environment(**{name: value for name, value in values.items() if value}):
            error = refused(parse(f"{scheme}://{clouds.bucket}/d"))
        assert "the credentials or settings for" in error.message and got in error.got
        assert error.hint and error.exit_code == 5

    @pytest.mark.parametrize(("scheme", "variable", "value"), UNPRINTABLE)
    def test_value_with_line_break_is_named_but_not_shown(self, clouds, monkeypatch, scheme, variable, value):
        """obstore panics at it."""
        monkeypatch.setenv(variable, value)
        error = refused(parse(f"{scheme}://{clouds.bucket}/d"))
        assert error.message == f"the value of {variable} cannot be sent"
        assert f"printenv {variable}" in error.hint and value.strip() not in f"{error.got}{error.expected}"


OTHER_API = [
    Fault("list-type", count=99, status=404, body=PAGE),
    Fault("list-type", count=99, status=404, body='{"error": {"code": 404}}'),
    Fault("list-type", count=99, status=404),
    Fault("list-type", count=99, status=405, body=PAGE),
    Fault("list-type", count=99, status=200, body='{"kind": "storage#objects"}'),
    Fault("list-type", count=99, status=200, body="<html><body>Log in<br></body></html>"),
    Fault("list-type", count=99, status=200),
    Fault("PUT", count=99, status=200),
    Fault("HEAD", count=99, status=200),
    Fault("GET .*out", count=99, status=200),
]


class TestOtherServers:
    @pytest.mark.parametrize(
        "fault", OTHER_API, ids=[f"{item.match} {item.status} {item.body[:8]}" for item in OTHER_API]
    )
    def test_server_with_only_json_api_is_reported(self, clouds, fault):
        clouds.server.faults.append(fault)
        before = dict(clouds.server.buckets[clouds.bucket])
        done = ckpt("convert", "hf-to-maxtext", HF, f"gs://{clouds.bucket}/out")
        assert done.exit_code == 5, done.output
        name = "does not offer the XML API of Google Cloud Storage (the JSON API alone is not enough)"
        assert f"Error: {clouds.server.url} {name}" in done.output, done.output
        assert "STORAGE_EMULATOR_HOST" in done.output and "does not exist" not in done.output
        assert clouds.server.buckets[clouds.bucket] == before

    @pytest.mark.parametrize("scheme", ["s3", "az"])
    def test_other_server_is_not_reported_as_empty_bucket(self, clouds, scheme):
        clouds.server.faults.append(Fault("list-type|comp=list", count=9, status=404, body=PAGE))
        error = refused(parse(f"{scheme}://{clouds.bucket}/d"))
        assert "does not offer the API of" in error.message and "ENDPOINT" in error.hint

    def test_leftover_scratch_object_is_reported_with_command(self, clouds):
        """Of a server that lists and writes, but answers without the tags of objects and deletes nothing."""
        clouds.server.faults += [Fault("PUT", count=99, status=200), Fault("DELETE", count=99, status=405)]
        done = ckpt("convert", "hf-to-maxtext", HF, f"gs://{clouds.bucket}/out")
        assert done.exit_code == 5
        assert f"gcloud storage rm gs://{clouds.bucket}/out.partial/lock-" in done.output, done.output

    def test_missing_bucket_differs_from_empty_directory(self, clouds):
        assert "does not exist" in refused(parse("gs://no-such-bucket/d")).message
        assert "it does not exist" in refused(parse(f"gs://{clouds.bucket}/d")).got
        body = error_body("NoSuchKey", "The specified key does not exist.")
        clouds.server.faults.append(Fault("list-type", count=9, status=404, body=body))
        assert "it does not exist" in refused(parse(f"gs://{clouds.bucket}/e")).got
        run("convert", "hf-to-maxtext", HF, f"gs://{clouds.bucket}/out")

    @pytest.mark.parametrize("scheme", ["gs", "s3"])
    def test_unfinished_uploads_use_certificate_settings(self, clouds, monkeypatch, tmp_path, scheme):
        authority = Authority(tmp_path)
        for name in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
            monkeypatch.delenv(name, raising=False)
        gs._pool.cache_clear()
        with encrypted(clouds.server.url.removeprefix("http://"), authority.context()) as front:
            for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
                monkeypatch.setenv(name, f"https://{front}")
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.path))
            location = parse(f"{scheme}://{clouds.bucket}/d")
            assert location.store.uploads(location.key) == []
        gs._pool.cache_clear()
