{{/* Pod templates of the two roles that carry rows, and the objects that run them. */}}
{{- define "afd.attentionPod" -}}
{{- $facts := include "afd.facts" . | fromYaml -}}
{{- include "afd.podTemplate" (dict
  "root" . "role" "attention" "data" true "keys" true
  "device" $facts.attentionDevice "accelerators" $facts.attentionRanks
  "grace" (add $facts.drainSeconds 45)
  "env" (include "afd.indexEnv" (dict "root" . "ranks" 1))
  "container" (include "afd.attentionContainer" .)
) -}}
{{- end -}}

{{- define "afd.attentionContainer" -}}
command: [bash, /etc/afd/run/attention.sh]
ports:
  - {name: api, containerPort: 8100}
  - {name: metrics, containerPort: 9300}
{{ include "afd.probes" (dict "root" . "ready" "/health" "live" "/health" "port" 8100 "step" 1) }}
{{- end -}}

{{- define "afd.ffnPod" -}}
{{- $facts := include "afd.facts" . | fromYaml -}}
{{- include "afd.podTemplate" (dict
  "root" . "role" "ffn" "data" true "keys" true
  "device" $facts.ffnDevice "accelerators" $facts.ranks
  "grace" 30
  "env" (include "afd.indexEnv" (dict "root" . "ranks" $facts.ranks))
  "container" (include "afd.ffnContainer" (dict "root" . "ranks" $facts.ranks))
) -}}
{{- end -}}

{{- define "afd.ffnContainer" -}}
command: [bash, /etc/afd/run/ffn.sh]
ports:
  - {name: metrics, containerPort: 9100}
{{ include "afd.probes" (dict "root" .root "ready" "/ready" "live" "/live" "port" 9100 "step" .ranks) }}
{{- end -}}

{{/* The spec of a LeaderWorkerSet: (dict "root" . "role" "ffn" "pod" YAML "replicas" 2). */}}
{{- define "afd.lwsSpec" -}}
{{- $role := include "afd.role" . | fromYaml -}}
replicas: {{ .replicas }}
startupPolicy: LeaderCreated
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration:
    maxSurge: 0 # a new pod takes the number, and so the GPUs and the name, of an old one
    maxUnavailable: {{ .maxUnavailable | default $role.maxUnavailable }}
leaderWorkerTemplate:
  size: 1 # all ranks of an instance are in one pod
  restartPolicy: None # the kubelet starts a container again; no other pod has to follow
  workerTemplate:
    {{- .pod | nindent 4 }}
{{- end -}}

{{/* A StatefulSet or a LeaderWorkerSet: (dict "root" . "role" "ffn" "pod" YAML "replicas" 2). */}}
{{- define "afd.instances" -}}
{{- $name := printf "%s-%s" (include "afd.fullname" .root) .role -}}
{{- $role := include "afd.role" . | fromYaml -}}
{{- $kind := include "afd.workload" .root -}}
{{- if eq $kind "leaderworkerset" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ $name }}
  labels: {{- include "afd.labels" . | nindent 4 }}
spec:
  {{- include "afd.lwsSpec" . | nindent 2 }}
{{- else if eq $kind "statefulset" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "afd.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{- include "afd.selector" . | nindent 4 }}
  ports: [{name: metrics, port: {{ ternary 9100 9300 (eq .role "ffn") }}}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels: {{- include "afd.labels" . | nindent 4 }}
spec:
  replicas: {{ .replicas }}
  serviceName: {{ $name }}
  podManagementPolicy: Parallel # attention and FFN instances wait for each other
  updateStrategy:
    type: RollingUpdate
    rollingUpdate: {maxUnavailable: {{ $role.maxUnavailable }}}
  selector:
    matchLabels: {{- include "afd.selector" . | nindent 6 }}
  template:
    {{- .pod | nindent 4 }}
{{- end -}}
{{- end -}}
