"""Object stores, read: `gs://`, `s3://` and `az://`, by obstore (`pip install 'ckpttools[cloud]'`).

A key is `bucket/name/of/object`. A directory is whatever names have in common before a `/`.
"""
