"""`az://container/key`: Azure Blob Storage, with account and credentials from the environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any, ClassVar

from ckpttools.core.errors import StorageError
from ckpttools.stores.objects.client import Access, metadata_headers
from ckpttools.stores.objects.errors import MessageTerms, login_hint
from ckpttools.stores.objects.store import ObjectStore

_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
# Environment variables for the account name in Azure's command line and libraries.
_ACCOUNTS = (_ACCOUNT, "AZURE_STORAGE_ACCOUNT")
_ENDPOINTS = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
# Environment variables from which obstore takes credentials: keys, signatures, tokens, service principals and
# workload identities.
_EXPLICIT = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT",
)


class AzureStore(ObjectStore):
    """The store for the scheme `az`."""

    scheme: ClassVar[str] = "az"
    header_variables: ClassVar[Sequence[str]] = (
        *_ACCOUNTS,
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_TOKEN",
    )
    words = MessageTerms(
        cloud="Azure Blob Storage",
        bucket="container",
        list_permission="to list blobs (role Storage Blob Data Reader)",
        read_permission="to read blobs (role Storage Blob Data Reader)",
        write_permission="to write and delete blobs (role Storage Blob Data Contributor)",
        list_buckets="az storage container list --auth-mode login --output table",
        remove="az storage blob delete-batch --source {bucket} --pattern {key}/*",
        remove_object="az storage blob delete --container-name {bucket} --name {key}",
        log_in="az login; or set AZURE_STORAGE_ACCOUNT_KEY, or AZURE_STORAGE_SAS_TOKEN",
        endpoint="AZURE_STORAGE_ENDPOINT",
        api="the API of Azure Blob Storage",
    )

    def access(self, bucket: str) -> Access:
        account = next(filter(None, map(os.environ.get, _ACCOUNTS)), None)
        is_emulated = bool(os.environ.get("AZURE_STORAGE_USE_EMULATOR"))
        if account is None and not is_emulated:
            raise StorageError(
                "no storage account is configured",
                location=f"az://{bucket}",
                expected=f"the name of the account in {_ACCOUNT}",
                hint=f"export {_ACCOUNT}=NAME",
            )
        config, identity = _credentials() if not is_emulated else ({}, "the emulator's account")
        if account:
            config["account_name"] = account
        endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "http://" if is_emulated else "")
        return Access("AzureStore", config, identity, endpoint, login_hint(self.words, endpoint))


def _credentials() -> tuple[dict[str, Any], str]:
    """Return the client configuration, and the identity for messages."""
    if os.environ.get("AZURE_SKIP_SIGNATURE"):
        return {"skip_signature": True}, "anonymous (AZURE_SKIP_SIGNATURE is set)"
    explicit = next((name for name in _EXPLICIT if os.environ.get(name)), None)
    if explicit:
        return {}, f"the identity in {explicit}"
    if shutil.which("az"):
        return {"use_azure_cli": True}, "the account of `az login`"
    if metadata_headers("/metadata/instance?api-version=2021-02-01", {"Metadata": "true"}) is not None:
        return {}, "the managed identity of this machine"
    return {"skip_signature": True}, (
        "anonymous: no credentials were found (environment, `az login`, metadata server)"
    )


STORE = AzureStore()
