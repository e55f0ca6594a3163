"""Messages and stubs of etcd's v3 API, generated from protos/batonmq_server/etcd_api."""
