"""Client of etcd: sessions, leases, transactions, and live copies of key prefixes."""
