{{/*
The deployment file of the pods, as YAML. The chart owns the keys that name addresses, paths and
ports; everything else is the user's.
*/}}
{{- define "afd.deployment" -}}
{{- $given := include "afd.given" . | fromYaml -}}
{{- $onePod := eq (include "afd.workload" .) "pod" -}}
{{- $name := default $given.served_model_name .Values.model.name -}}
{{- $own := dict
  "model" .Values.model.mountPath
  "served_model_name" (default .Release.Name $name)
  "gateway" (dict "host" "0.0.0.0" "port" 8000)
  "metrics" (dict "enabled" true)
-}}
{{- if not $onePod -}}
{{- $address := printf "tcp://%s-control:5555" (include "afd.fullname" .) -}}
{{- $_ := set $own "control" (dict "address" $address "keys" "/etc/afd/keys/control.keys") -}}
{{- $_ := set $own "attention" (dict "port" 8100) -}}
{{- $_ := set $own.gateway "processes" 1 -}}
{{- $_ := set $own "transport" (dict "backend" (include "afd.backend" .)) -}}
{{- end -}}
{{- if .Values.rdma.ports -}}
{{- $verbs := dict "verbs" (dict "ports" .Values.rdma.ports) -}}
{{- $_ := set $own "transport" (merge $verbs (default dict $own.transport)) -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $own.gateway "api_keys" "/etc/afd/api-keys/api.keys" -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $own.gateway "tls" (dict "certificate" "/etc/afd/tls/tls.crt" "key" "/etc/afd/tls/tls.key") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $given $own) -}}
{{- end -}}

{{/* The user's deployment, without the keys that Kubernetes answers. */}}
{{- define "afd.given" -}}
{{- $given := fromYaml (default "{}" .Values.deploymentFile) -}}
{{- if $given.Error -}}
{{- fail (printf "deploymentFile is not YAML: %s" $given.Error) -}}
{{- end -}}
{{- $given = mergeOverwrite $given (deepCopy .Values.deployment) -}}
{{- $given = omit $given "hosts" "gpus" -}}
{{- range $section, $keys := dict "attention" (list "host" "cpus") "ffn" (list "cpus") "transport" (list "host") "control" (list "host" "keys" "address") -}}
{{- $value := index $given $section -}}
{{- if kindIs "map" $value -}}
{{- range $keys -}}{{- $_ := unset $value . -}}{{- end -}}
{{- else -}}
{{- $_ := unset $given $section -}}
{{- end -}}
{{- end -}}
{{- toYaml $given -}}
{{- end -}}

{{/* Pods are hosts of their own: shm and ipc do not reach from one to another. */}}
{{- define "afd.backend" -}}
{{- $wanted := dig "transport" "backend" "auto" (include "afd.given" . | fromYaml) -}}
{{- if has $wanted (list "tcp" "verbs") -}}
{{ $wanted }}
{{- else -}}
{{ ternary "verbs" "tcp" .Values.rdma.enabled }}
{{- end -}}
{{- end -}}

{{/* Facts of the deployment as YAML: replicas, ranks, accelerators per pod, deadlines in seconds. */}}
{{- define "afd.facts" -}}
{{- $d := include "afd.given" . | fromYaml -}}
{{- $tp := dig "ffn" "tp" 1 $d | int -}}
attention: {{ dig "attention" "instances" 1 $d | int }}
ffn: {{ dig "ffn" "instances" 1 $d | int }}
ranks: {{ $tp }}
attentionRanks: {{ dig "attention" "tp" 1 $d | int }}
attentionDevice: {{ dig "attention" "device" "cpu" $d }}
ffnDevice: {{ dig "ffn" "device" "cpu" $d }}
startSeconds: {{ default (add 60 (ceil (dig "deadlines" "start_s" 180 $d))) (int .Values.probes.startSeconds) }}
drainSeconds: {{ ceil (dig "deadlines" "drain_s" 30 $d) }}
{{- end -}}

{{/* Stops the rendering with a remedy where values are missing or contradict one another. */}}
{{- define "afd.check" -}}
{{- if not (or .Values.deploymentFile .Values.deployment) -}}
{{- fail "deploymentFile is empty: give a deployment file with --set-file deploymentFile=FILE; `afd examples DIR` writes some" -}}
{{- end -}}
{{- if not .Values.model.volume -}}
{{- fail "model.volume is empty: name the volume with the checkpoint, such as --set model.volume.persistentVolumeClaim.claimName=models" -}}
{{- end -}}
{{- if and (ne (include "afd.workload" .) "pod") (not .Values.keys.existingSecret) -}}
{{- fail "keys.existingSecret is empty: run `afd keys control.keys`, then `kubectl create secret generic afd-keys --from-file=control.keys`, and set keys.existingSecret=afd-keys" -}}
{{- end -}}
{{- $ports := default (dig "transport" "verbs" "ports" list (include "afd.given" . | fromYaml)) .Values.rdma.ports -}}
{{- if and (ne (include "afd.workload" .) "pod") (eq (include "afd.backend" .) "verbs") (not $ports) -}}
{{- fail "backend verbs needs rdma.ports, the RDMA ports inside the pods, such as --set rdma.ports={mlx5_0:1}; `afd doctor` in a pod lists them" -}}
{{- end -}}
{{- if and (ne (include "afd.workload" .) "pod") (eq (include "afd.backend" .) "verbs") (not .Values.rdma.enabled) -}}
{{- fail "backend verbs needs RDMA devices in the pods; set rdma.enabled=true" -}}
{{- end -}}
{{- $given := include "afd.given" . | fromYaml -}}
{{- if and (ne (include "afd.workload" .) "pod") (dig "prefill" "instances" 0 $given) (ne (dig "prefill" "by" "colocated" $given) "afd") -}}
{{- fail "the chart starts no colocated prefill instances; set prefill.by to afd" -}}
{{- end -}}
{{- if and .Values.rdma.hostNetwork .Values.rdma.networks -}}
{{- fail "rdma.hostNetwork and rdma.networks exclude each other; set one of them" -}}
{{- end -}}
{{- end -}}
