{{/*
The StatefulSet of a service, and its disruption budget: a dict of
  root       the root context
  service    storage, offsets, lockmgr, nameserver or gateway
  name       of the StatefulSet
  labels     that select its pods
  replicas   nil if an autoscaler decides
  domain     the headless Service of its pods
  ports      by name
  env        settings of this StatefulSet only
  graceS     terminationGracePeriodSeconds with the default settings
*/}}
{{- define "batonmq.node" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .service -}}
{{- $prefix := printf "BATON_%s" (upper .service) -}}
{{- $settings := include "batonmq.settings" (dict "root" $root "name" .service) -}}
{{- $keys := or (eq .service "gateway") (and (eq .service "nameserver") $root.Values.gateway.enabled) -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{ include "batonmq.labels" $root | nindent 4 }}
    {{- with index .labels "batonmq/broker" }}
    batonmq/broker: {{ . }}
    {{- end }}
spec:
  serviceName: {{ .domain }}
  {{- if not (kindIs "invalid" .replicas) }}
  replicas: {{ .replicas }}
  {{- end }}
  # The replicas of a set start together: none is ready alone.
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{ toYaml .labels | nindent 6 }}
  template:
    metadata:
      labels:
        app.kubernetes.io/part-of: batonmq
        {{- toYaml .labels | nindent 8 }}
      annotations:
        # A changed setting restarts the pods.
        checksum/settings: {{ print $settings (include "batonmq.etcdEndpoints" $root) $root.Values.cluster | sha256sum }}
    spec:
      serviceAccountName: {{ .service }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      # For preStop, then the drain and the calls in progress, then the last writes.
      terminationGracePeriodSeconds: {{ include "batonmq.grace" . }}
      securityContext: {{ include "batonmq.podSecurity" . | nindent 8 }}
        fsGroupChangePolicy: OnRootMismatch
      {{- include "batonmq.spread" (dict "labels" .labels "machines" $root.Values.machines) | nindent 6 }}
      {{- include "batonmq.scheduling" (dict "root" $root "values" $values) | trim | nindent 6 }}
      containers:
        - name: {{ .service }}
          image: {{ include "batonmq.image" (dict "root" $root "image" $root.Values.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [python, -m, batonmq_server.{{ .service }}]
          envFrom:
            - configMapRef:
                name: {{ .service }}
            {{- with $values.secretEnv }}
            - secretRef:
                name: {{ . }}
            {{- end }}
          env:
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            - name: POD_NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
            - name: {{ $prefix }}_NODE_ID
              value: $(POD_NAME)
            - name: {{ $prefix }}_ADVERTISE_ADDRESS
              value: $(POD_NAME).{{ .domain }}.$(POD_NAMESPACE).svc:{{ .ports.grpc }}
            - name: {{ $prefix }}_CLUSTER
              valueFrom:
                configMapKeyRef:
                  name: cluster
                  key: name
            - name: {{ $prefix }}_ETCD
              valueFrom:
                configMapKeyRef:
                  name: cluster
                  key: etcd
            {{- range $name, $value := .env }}
            - name: {{ $name }}
              value: {{ $value | quote }}
            {{- end }}
            {{- if contains "$(POD_INDEX)" $settings }}
            - name: POD_INDEX
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
            {{- end }}
            {{- range $name, $value := $settings | fromYaml }}
            {{- if include "batonmq.ofPod" $value }}
            - name: {{ $name }}
              value: {{ $value | quote }}
            {{- end }}
            {{- end }}
          ports:
            {{- range $name, $port := .ports }}
            - name: {{ $name }}
              containerPort: {{ $port }}
            {{- end }}
            - name: metrics
              containerPort: 9464
            - name: health
              containerPort: 9465
          # Time to read the stored data, up to a day: without its indexes, a node reads the whole log again. A gateway waits
          # for a nameserver.
          startupProbe:
            grpc:
              port: 9465
              service: started
            periodSeconds: 2
            timeoutSeconds: 5
            failureThreshold: {{ or (hasKey $values "volume") (eq .service "gateway") | ternary 43200 150 }}
          # Ready: registered, and in sync with its leader; a node without replicas has read its state from etcd.
          readinessProbe:
            grpc:
              port: 9465
              service: ready
            periodSeconds: 2
            timeoutSeconds: 5
            failureThreshold: 3
          # Alive: the event loop runs. This does not depend on peers or the disk.
          livenessProbe:
            grpc:
              port: 9465
              service: live
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 6
          lifecycle:
            # Clients are no longer routed here; the drain starts with SIGTERM.
            preStop:
              sleep:
                seconds: 3
          resources: {{ toYaml $values.resources | nindent 12 }}
          securityContext: {{ include "batonmq.containerSecurity" . | nindent 12 }}
          volumeMounts:
            - name: tmp
              mountPath: /tmp
            {{- if hasKey $values "volume" }}
            - name: data
              mountPath: /var/lib/baton
            {{- end }}
            {{- if $keys }}
            - name: keys
              mountPath: /etc/baton/keys
              readOnly: true
            {{- end }}
            {{- if $root.Values.etcd.tls }}
            - name: etcd
              mountPath: /etc/baton/etcd
              readOnly: true
            {{- end }}
            {{- if include "batonmq.tls" $root }}
            - name: tls
              mountPath: /etc/baton/tls
              readOnly: true
            {{- end }}
      volumes:
        - name: tmp
          emptyDir:
            sizeLimit: 64Mi
        {{- if $keys }}
        - {{ include "batonmq.secretVolume" (dict "name" "keys" "secret" "gateway-keys") | nindent 10 | trim }}
            {{- if eq .service "nameserver" }}
            items:
              - key: sealing.key
                path: sealing.key
            {{- end }}
        {{- end }}
        {{- if $root.Values.etcd.tls }}
        - {{ include "batonmq.secretVolume" (dict "name" "etcd" "secret" "etcd-client") | nindent 10 | trim }}
        {{- end }}
        {{- if include "batonmq.tls" $root }}
        - {{ include "batonmq.secretVolume" (dict "name" "tls" "secret" (print "tls-" .service)) | nindent 10 | trim }}
        {{- end }}
  {{- if hasKey $values "volume" }}
  volumeClaimTemplates:
    - {{ include "batonmq.claim" (dict "labels" .labels "volume" $values.volume) | nindent 6 | trim }}
  {{- end }}
---
{{ include "batonmq.budget" . }}
{{- end }}

{{/* A Service: a dict of root, name, headless, selects (labels) and ports. */}}
{{- define "batonmq.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "batonmq.labels" .root | nindent 4 }}
    {{- with .label }}
    app.kubernetes.io/name: {{ . }}
    {{- end }}
spec:
  {{- if .headless }}
  clusterIP: None
  # Peers must resolve each other before they are ready, and reach each other while they stop.
  publishNotReadyAddresses: true
  {{- end }}
  selector: {{ toYaml .selects | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - name: {{ $name }}
      port: {{ $port }}
      targetPort: {{ $name }}
    {{- end }}
{{- end }}

{{/* A ServiceAccount without rights, because no pod calls the API server: a dict of root and name. */}}
{{- define "batonmq.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "batonmq.labels" .root | nindent 4 }}
automountServiceAccountToken: false
{{- end }}
