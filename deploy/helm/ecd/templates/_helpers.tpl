{{- define "ecd.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "ecd.fullname" -}}
{{- $name := include "ecd.name" . }}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Unlike any other release's in the cluster and on a node. A namespace has no dot. */}}
{{- define "ecd.unique" -}}
{{ .Release.Namespace }}.{{ include "ecd.fullname" . }}
{{- end }}

{{- define "ecd.hostPath" -}}
{{ .Values.hostPath | default (printf "/dev/shm/%s" (include "ecd.unique" .)) }}
{{- end }}

{{- define "ecd.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ecd.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ecd.labels" -}}
{{ include "ecd.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* A size of the schema's form in MiB. */}}
{{- define "ecd.mebibytes" -}}
{{- $units := dict "M" 1 "G" 1024 "T" 1048576 }}
{{- $digits := regexFind "^[0-9]+" . }}
{{- mul ($digits | int64) (get $units (trimPrefix $digits . | trunc 1)) }}
{{- end }}

{{/* A whole number as digits: Helm reads numbers as floats, which print as 4.294967296e+09. */}}
{{- define "ecd.text" -}}
{{- if kindIs "float64" . }}
  {{- if eq (. | int64 | float64) . }}{{ . | int64 }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . }}{{ end }}
{{- end }}

{{/* The memory request: the kubelet evicts first what uses more than it has requested. */}}
{{- define "ecd.memory" -}}
{{- $size := include "ecd.mebibytes" .Values.size | int64 }}
{{- $memory := .Values.memory }}
{{- if $memory }}
  {{- if le (include "ecd.mebibytes" .Values.memory | int64) $size }}
    {{- fail (printf "memory=%s does not hold size=%s, the index and the daemon: leave memory out for 1Gi above size" .Values.memory .Values.size) }}
  {{- end }}
{{- else }}
  {{- $needed := add $size 1024 }}
  {{- $memory = mod $needed 1024 | eq 0 | ternary (printf "%dGi" (div $needed 1024)) (printf "%dMi" $needed) }}
{{- end }}
{{- with .Values.limits.memory }}
  {{- $limit := include "ecd.text" . }}
  {{- $digits := regexFind "^[0-9.]+" $limit }}
  {{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
  {{- with get $units (trimPrefix $digits $limit) }}
    {{- if lt (mulf $digits .) (mulf (include "ecd.mebibytes" $memory) 1048576) }}
      {{- fail (printf "limits.memory=%s is below the request of %s: raise it, or leave it out" $limit $memory) }}
    {{- end }}
  {{- end }}
{{- end }}
{{- $memory }}
{{- end }}

{{/* The daemon's variables. Those of extraEnv come first: others may name them as $(NAME). */}}
{{- define "ecd.env" -}}
{{- $ports := .Values.ports }}
{{- $settings := dict
  "ECD_ADDRESS" "unix:///run/ecd/ecd.sock"
  "ECD_SHM_DIR" "/run/ecd"
  "ECD_GROUP" "10001"
  "ECD_HOST_POOL_BYTES" .Values.size
  "ECD_METRICS_ADDRESS" (printf "0.0.0.0:%v" $ports.metrics)
  "ECD_HEALTH_ADDRESS" (printf "0.0.0.0:%v" $ports.health)
  "ECD_LOG_FORMAT" "json" }}
{{- $env := .Values.extraEnv }}
{{- $given := list }}
{{- range $env }}{{ $given = append $given .name }}{{ end }}
{{- if .Values.disk.size }}
  {{- $_ := set $settings "ECD_DISK_POOL_BYTES" .Values.disk.size }}
  {{- $_ := set $settings "ECD_DISK_DIR" "/var/cache/ecd" }}
{{- end }}
{{- if ne $ports.engine "18200-18231" }}
  {{- $_ := set $settings "ECD_ENGINE_PORTS" $ports.engine }}
{{- end }}
{{- with .Values.peers }}
  {{- if .enabled }}
    {{- $ip := dict "fieldRef" (dict "fieldPath" "status.podIP") }}
    {{- $env = append $env (dict "name" "POD_IP" "valueFrom" $ip) }}
    {{- $_ := set $settings "ECD_PEER_ADDRESS" (printf "$(POD_IP):%v" $ports.peer) }}
    {{- if and .tokenSecret (not (has "ECD_PEER_TOKEN" $given)) }}
      {{- $token := dict "secretKeyRef" (dict "name" .tokenSecret "key" "token") }}
      {{- $env = append $env (dict "name" "ECD_PEER_TOKEN" "valueFrom" $token) }}
    {{- end }}
    {{- if .directorySecret }}
      {{- $url := dict "secretKeyRef" (dict "name" .directorySecret "key" "url") }}
      {{- $env = append $env (dict "name" "ECD_DIRECTORY" "valueFrom" $url) }}
    {{- else if .directory }}
      {{- $_ := set $settings "ECD_DIRECTORY" .directory }}
    {{- else if not (or $.Values.envFrom (has "ECD_DIRECTORY" $given)) }}
      {{- fail "peers.directory: which Redis? redis://HOST:6379/0, or with a password peers.directorySecret" }}
    {{- end }}
  {{- end }}
{{- end }}
{{- $settings = merge (deepCopy .Values.settings) $settings }}
{{- range $name, $value := $settings }}
  {{- if regexMatch "://[^/@]*:[^/@$][^/@]*@" (toString $value) }}
    {{- fail (printf "%s has a password in it: put the URL into a Secret, and name that in peers.directorySecret or extraEnv" $name) }}
  {{- end }}
  {{- if not (has $name $given) }}
    {{- $env = append $env (dict "name" $name "value" (include "ecd.text" $value)) }}
  {{- end }}
{{- end }}
{{- toYaml $env }}
{{- end }}
