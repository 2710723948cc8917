"""Object stores `gs://`, `s3://` and `az://`, based on obstore (`pip install 'ckpttools[cloud]'`).

A key has the form `bucket/name/of/object`. A directory is a common prefix of names that ends before a `/`.
"""
