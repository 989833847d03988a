#!/usr/bin/env bash
# Make the environment of the torch backend's tests, a separate one because torch is large: nexar as in `make setup`, torch,
# and what PyTorch's own backend tests import.
#   setup/torch_environment.sh                                    .venv-torch, with the newest torch
#   VENV=.venv-torch-2.13 TORCH=2.13.0 setup/torch_environment.sh  another one beside it
set -euo pipefail
cd "$(dirname "$0")/.."
export VENV=${VENV:-.venv-torch} TORCH=${TORCH:-2.15.0}
setup/all.sh
setup/torch.sh
