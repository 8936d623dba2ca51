#!/bin/sh
# The launcher as the driver of a standalone cluster. Executors need pgsub with the same minor version of Python: here it
# comes as an archive (python -m pgsub.spark.archive pgsub_env.tar.gz). The driver's interpreter is the launcher's own.
exec spark-submit --master "${MASTER:-spark://head:7077}" --deploy-mode client \
    --archives pgsub_env.tar.gz#env --conf spark.pyspark.python=./env/bin/python \
    --conf spark.pyspark.driver.python=python --conf spark.speculation=false \
    "$(dirname "$0")/submit.py" run "$@"
