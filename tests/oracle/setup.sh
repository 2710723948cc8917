#!/usr/bin/env bash
# setup.sh DIRECTORY [maxtext]: MaxText in DIRECTORY/maxtext, and but for "maxtext" torch and transformers in
# DIRECTORY/torch; for the CPU.
# Again, it adds what is missing. PYTHON names a Python 3.12 where none is found, TORCH another build of torch.
set -euo pipefail
directory=${1:?usage: setup.sh DIRECTORY [maxtext]}
here=$(cd "$(dirname "$0")" && pwd)
python=
for each in ${PYTHON:-} python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3; do
  if "$each" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=$each
    break
  fi
done
[ -n "$python" ] || {
  echo "MaxText needs Python 3.12: name one with PYTHON=, or environments with ORACLE_MAXTEXT= and ORACLE_TORCH=" >&2
  exit 3
}

maxtext=$directory/maxtext
[ -x "$maxtext/bin/python" ] || "$python" -m venv "$maxtext"
# Its own list asks for about 1000 packages; these are those that the CPU imports.
"$maxtext/bin/python" -m pip install --quiet --no-deps -r "$here/requirements-maxtext.txt"

# Named by imports and never called: clients of clouds that would bring 40 packages more.
site=$("$maxtext/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
for name in fastapi uvicorn; do
  [ -e "$site/$name" ] || cp "$here/stand_in.py" "$site/$name.py"
done
if [ ! -e "$site/cloud_accelerator_diagnostics/__init__.py" ]; then
  mkdir -p "$site/cloud_accelerator_diagnostics"
  touch "$site"/cloud_accelerator_diagnostics/{__init__,tensorboard,uploader}.py
fi
JAX_PLATFORMS=cpu DECOUPLE_GCLOUD=TRUE "$maxtext/bin/python" -c 'from maxtext.trainers.pre_train import train'
touch "$maxtext/ready"
[ "${2:-}" != maxtext ] || exit 0

torch=$directory/torch
[ -x "$torch/bin/python" ] || "$python" -m venv "$torch"
if ! "$torch/bin/python" -c 'import torch' 2>/dev/null; then
  # Without CUDA, where such a build is offered: 200 MB in place of several GB.
  "$torch/bin/python" -m pip install --quiet "${TORCH:-torch==2.13.0+cpu}" 2>/dev/null ||
    "$torch/bin/python" -m pip install --quiet torch==2.13.0
fi
"$torch/bin/python" -m pip install --quiet -r "$here/requirements-torch.txt"
"$torch/bin/python" -c 'import torch, transformers'
touch "$torch/ready"
