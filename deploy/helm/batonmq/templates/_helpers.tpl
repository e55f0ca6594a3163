{{/* Labels of every resource. Those of Helm are not in pods, so that a new chart version restarts nothing. */}}
{{- define "batonmq.labels" -}}
app.kubernetes.io/part-of: batonmq
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "batonmq.tls" -}}
{{- if ne .Values.security.mode "insecure" }}true{{ end }}
{{- end }}

{{- define "batonmq.access" -}}
{{- if eq .Values.security.mode "access" }}true{{ end }}
{{- end }}

{{/* An image of the project: a dict of root and image. */}}
{{- define "batonmq.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "batonmq.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "batonmq.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The fields of a pod that users choose: a dict of root and values. */}}
{{- define "batonmq.scheduling" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/*
The grace period of a pod in seconds: a dict of root, service and graceS, the period with the default settings. It grows
with the settings that it covers, unless the user has chosen it.
*/}}
{{- define "batonmq.grace" -}}
{{- $values := index .root.Values .service -}}
{{- $settings := $values.settings | default dict -}}
{{- $moreMs := 0 -}}
{{- range $name, $defaultMs := dict "SHUTDOWN_GRACE_MS" 10000 "DRAIN_TIMEOUT_MS" 30000 -}}
{{- $ms := get $settings (printf "BATON_%s_%s" (upper $.service) $name) | default $defaultMs | int64 -}}
{{- $moreMs = add $moreMs (max 0 (sub $ms $defaultMs)) -}}
{{- end -}}
{{- $values.terminationGracePeriodSeconds | default (add .graceS (div (add $moreMs 999) 1000)) | int64 -}}
{{- end }}

{{/* Pods with these labels on different machines and in different zones: a dict of labels and machines. */}}
{{- define "batonmq.spread" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{ toYaml .labels | nindent 14 }}
    {{- if eq .machines "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{ toYaml .labels | nindent 12 }}
    {{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ toYaml .labels | nindent 8 }}
{{- end }}

{{/* A disruption budget: a dict of root, name and labels. */}}
{{- define "batonmq.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "batonmq.labels" .root | nindent 4 }}
    {{- with index .labels "batonmq/broker" }}
    batonmq/broker: {{ . }}
    {{- end }}
spec:
  maxUnavailable: 1
  # A pod that is not ready does not serve, and must not block the drain of its machine.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{ toYaml .labels | nindent 6 }}
{{- end }}

{{/* A volume claim template: a dict of labels and volume. */}}
{{- define "batonmq.claim" -}}
metadata:
  name: data
  labels:
    app.kubernetes.io/part-of: batonmq
    {{- with index .labels "batonmq/broker" }}
    batonmq/broker: {{ . }}
    {{- end }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .volume.storageClassName }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .volume.size }}
{{- end }}

{{/* The volume of a Secret: a dict of name and secret. */}}
{{- define "batonmq.secretVolume" -}}
name: {{ .name }}
secret:
  secretName: {{ .secret }}
  defaultMode: 0440
{{- end }}

{{/* The three files of a certificate, as settings: a dict of prefix and folder. */}}
{{- define "batonmq.certificate" -}}
{{ .prefix }}_CERT_FILE: {{ .folder }}/tls.crt
{{ .prefix }}_KEY_FILE: {{ .folder }}/tls.key
{{ .prefix }}_CA_FILE: {{ .folder }}/ca.crt
{{- end }}

{{- define "batonmq.etcdEndpoints" -}}
{{- if .Values.etcd.inside -}}
etcd-0.etcd:2379,etcd-1.etcd:2379,etcd-2.etcd:2379
{{- else -}}
{{ join "," .Values.etcd.endpoints }}
{{- end -}}
{{- end }}

{{/*
The space quota of etcd in bytes: half of the volume, because its log and a defragmentation need the rest, and at most
8 GiB; 1 GiB if the size is no whole number of Mi or Gi.
*/}}
{{- define "batonmq.etcdQuota" -}}
{{- $unit := dict "Mi" 1048576 "Gi" 1073741824 -}}
{{- $number := regexFind "^[0-9]+" .Values.etcd.volume.size -}}
{{- $suffix := trimPrefix $number .Values.etcd.volume.size -}}
{{- if hasKey $unit $suffix -}}
{{- min (div (mul (int64 $number) (index $unit $suffix)) 2) 8589934592 -}}
{{- else -}}
1073741824
{{- end -}}
{{- end }}

{{/* 40 % of the limit of memory of storage, in bytes; the service's default is a share of the machine's memory. */}}
{{- define "batonmq.memoryWindow" -}}
{{- $limit := .Values.storage.resources.limits.memory -}}
{{- $unit := dict "Mi" 1048576 "Gi" 1073741824 -}}
{{- $number := regexFind "^[0-9]+" $limit -}}
{{- $suffix := trimPrefix $number $limit -}}
{{- if not (hasKey $unit $suffix) -}}
{{- fail (printf "storage.resources.limits.memory is %q, which is no whole number of Mi or Gi: give it as one, or set BATON_STORAGE_MEMORY_WINDOW_BYTES in storage.settings" $limit) -}}
{{- end -}}
{{- div (mul (int64 $number) (index $unit $suffix) 2) 5 -}}
{{- end }}
