{{/* Names and labels. */}}
{{- define "afd.fullname" -}}
{{- if contains "afd" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-afd" .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select the pods of a role: (dict "root" . "role" "ffn"). */}}
{{- define "afd.selector" -}}
app.kubernetes.io/name: afd
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "afd.labels" -}}
{{ include "afd.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "afd.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{/* disaggregatedset, leaderworkerset, statefulset or pod. */}}
{{- define "afd.workload" -}}
{{- if ne .Values.workload "auto" -}}
{{ .Values.workload }}
{{- else if .Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" -}}
leaderworkerset
{{- else -}}
statefulset
{{- end -}}
{{- end -}}

{{/* The label that holds a pod's number. */}}
{{- define "afd.indexLabel" -}}
{{- if eq (include "afd.workload" .) "statefulset" -}}
apps.kubernetes.io/pod-index
{{- else -}}
leaderworkerset.sigs.k8s.io/group-index
{{- end -}}
{{- end -}}
