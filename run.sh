cd /tmp/w15; PYTHONPATH=/tmp/w15 exec ${VENV:-/work/main/.venv}/bin/python -m pytest -q -x -p no:cacheprovider "$@"
