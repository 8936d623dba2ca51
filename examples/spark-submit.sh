#!/bin/sh
# The launcher as the driver of a standalone cluster. Executors need pgsub with the same minor version of Python: here it
# comes as an archive of venv-pack (venv-pack -o pgsub_env.tar.gz).
exec spark-submit --master "${MASTER:-spark://head:7077}" --deploy-mode client \
    --archives pgsub_env.tar.gz#env --conf spark.pyspark.python=./env/bin/python \
    --conf spark.speculation=false \
    "$(dirname "$0")/submit.py" run "$@"
