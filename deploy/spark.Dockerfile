# The Spark jobs: docker run batonmq/spark python -m batonspark.jobs.stream
# The wheels contain Spark and its JVM. The entrypoint also starts the driver or an executor if Spark runs them in pods.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b

FROM ${BASE_IMAGE} AS builder
RUN python3 -m venv /opt/baton
COPY spark /wheels
RUN /opt/baton/bin/pip install --no-cache-dir --no-compile --no-index --no-deps /wheels/*.whl \
 && /opt/baton/bin/pip uninstall --quiet --yes pip setuptools \
 && find /opt/baton -type d -name tests -prune -exec rm -rf {} +

FROM ${BASE_IMAGE}
ENV PATH=/opt/baton/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
RUN echo 'baton:x:10001:10001::/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'baton:x:10001:' >> /etc/group \
 && install -d -o 10001 -g 10001 /var/lib/baton
COPY --from=builder /opt/baton /opt/baton
COPY spark-entrypoint.sh /opt/entrypoint.sh
USER 10001:10001
WORKDIR /opt
ENTRYPOINT ["/opt/entrypoint.sh"]
CMD ["python", "-m", "batonspark.jobs.stream"]
