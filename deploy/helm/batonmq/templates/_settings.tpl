{{/* The settings of a service: a dict of root and name. A change of them restarts its pods. */}}
{{- define "batonmq.settings" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .name -}}
{{- $prefix := printf "BATON_%s" (upper .name) -}}
{{- $ports := dict "storage" "10911" "offsets" "10912" "lockmgr" "10913" "nameserver" "9876" "gateway" "8081" -}}
{{- $set := dict -}}
{{- $_ := set $set (print $prefix "_HOST") "0.0.0.0" -}}
{{- $_ := set $set (print $prefix "_PORT") (index $ports .name) -}}
{{- $_ := set $set (print $prefix "_METRICS_PORT") "9464" -}}
{{- $_ := set $set (print $prefix "_HEALTH_PORT") "9465" -}}
{{- $_ := set $set (print $prefix "_LOG_FORMAT") "json" -}}
{{- if hasKey $values "volume" -}}
{{- $_ := set $set (print $prefix "_DATA_DIR") (print "/var/lib/baton/" .name) -}}
{{- end -}}
{{- if and (eq .name "storage") (not (hasKey $values.settings "BATON_STORAGE_MEMORY_WINDOW_BYTES")) -}}
{{- $_ := set $set "BATON_STORAGE_MEMORY_WINDOW_BYTES" (include "batonmq.memoryWindow" $root) -}}
{{- end -}}
{{- if and (eq .name "offsets") $root.Values.ha -}}
{{- $_ := set $set "BATON_OFFSETS_REPLICAS" "offsets-0,offsets-1,offsets-2" -}}
{{- $_ := set $set "BATON_OFFSETS_MIN_IN_SYNC" "2" -}}
{{- end -}}
{{- if eq .name "gateway" -}}
{{- $_ := set $set "BATON_GATEWAY_RECEIPT_KEY_FILE" "/etc/baton/keys/receipt.key" -}}
{{- end -}}
{{- if $root.Values.etcd.tls -}}
{{- $set = merge $set (include "batonmq.certificate" (dict "prefix" (print $prefix "_ETCD") "folder" "/etc/baton/etcd") | fromYaml) -}}
{{- end -}}
{{- if include "batonmq.tls" $root -}}
{{- $set = merge $set (include "batonmq.certificate" (dict "prefix" (print $prefix "_TLS") "folder" "/etc/baton/tls") | fromYaml) -}}
{{- if eq .name "gateway" -}}
{{- $_ := set $set "BATON_GATEWAY_TLS_PORT" "8082" -}}
{{- end -}}
{{- else -}}
{{- $_ := set $set (print $prefix "_INSECURE_NETWORK") "true" -}}
{{- end -}}
{{- if include "batonmq.access" $root -}}
{{- $_ := set $set (print $prefix "_ACCESS") "true" -}}
{{- $_ := set $set (print $prefix "_ACCESS_ADMINS") (join "," $root.Values.security.admins) -}}
{{- if eq .name "gateway" -}}
{{- $_ := set $set "BATON_GATEWAY_SEALING_KEY_FILE" "/etc/baton/keys/sealing.key" -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite $set $values.settings) -}}
{{- end }}

{{/* Whether a setting names a variable of its pod, such as $(POD_NAME): Kubernetes puts it in only in `env`. */}}
{{- define "batonmq.ofPod" -}}
{{- if contains "$(" . }}true{{ end }}
{{- end }}

{{/* The ConfigMap of a service: a dict of root and name. */}}
{{- define "batonmq.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "batonmq.labels" .root | nindent 4 }}
{{- $data := dict }}
{{- range $name, $value := include "batonmq.settings" . | fromYaml }}
{{- if not (include "batonmq.ofPod" $value) }}
{{- $_ := set $data $name $value }}
{{- end }}
{{- end }}
data: {{ toYaml $data | nindent 2 }}
{{- end }}
