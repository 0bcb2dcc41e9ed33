{{/* The values of a role over those of every pod: (dict "root" . "role" "ffn"). */}}
{{- define "afd.role" -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.pod) (deepCopy (index .root.Values .role))) -}}
{{- end -}}

{{/* Accelerators of one pod: (dict "root" . "device" "cuda" "count" 2). */}}
{{- define "afd.accelerators" -}}
{{- $resource := .root.Values.accelerator.resource -}}
{{- if not $resource -}}
{{- $resource = get (dict "cuda" "nvidia.com/gpu" "rocm" "amd.com/gpu") .device -}}
{{- end -}}
{{- if and $resource (ne .device "cpu") -}}
{{ $resource }}: {{ .count | quote }}
{{- end -}}
{{- end -}}

{{/*
A pod template: (dict "root" . "role" "ffn" "container" YAML "device" "cuda" "accelerators" 2
"data" true "grace" 30). data: the pod carries rows, so it takes RDMA and /dev/shm.
*/}}
{{- define "afd.podTemplate" -}}
{{- $root := .root -}}
{{- $role := include "afd.role" . | fromYaml -}}
{{- $rdma := and .data $root.Values.rdma.enabled -}}
metadata:
  labels:
    {{- include "afd.labels" . | nindent 4 }}
    {{- with $role.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/deployment: {{ include "afd.deployment" $root | sha256sum }}
    {{- if and $rdma $root.Values.rdma.networks }}
    k8s.v1.cni.cncf.io/networks: {{ join "," $root.Values.rdma.networks | quote }}
    {{- end }}
    {{- with $role.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with $root.Values.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if and .data $root.Values.accelerator.runtimeClassName }}
  runtimeClassName: {{ $root.Values.accelerator.runtimeClassName }}
  {{- end }}
  {{- if and $rdma $root.Values.rdma.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace }}
  securityContext:
    {{- $context := deepCopy $root.Values.podSecurityContext }}
    {{- if and .data $root.Values.accelerator.supplementalGroups }}
    {{- $_ := set $context "supplementalGroups" $root.Values.accelerator.supplementalGroups }}
    {{- end }}
    {{- toYaml $context | nindent 4 }}
  {{- with $role.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $role.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $role.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $role.topologySpreadConstraints }}
    {{- toYaml $role.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "afd.selector" . | nindent 10 }}
    {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "afd.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- $own := deepCopy $root.Values.securityContext }}
        {{- if $rdma }}
        {{- $_ := set $own "capabilities" (merge (dict "add" (list "IPC_LOCK")) (default dict $own.capabilities)) }}
        {{- end }}
        {{- toYaml $own | nindent 8 }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: HOME, value: /tmp} # caches of vLLM and Triton
        - {name: PYTHONUNBUFFERED, value: "1"}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $role.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- .container | nindent 6 }}
      resources:
        {{- $resources := deepCopy (default dict $role.resources) }}
        {{- $limits := include "afd.accelerators" (dict "root" $root "device" .device "count" .accelerators) | fromYaml }}
        {{- if and $rdma $root.Values.rdma.resource }}
        {{- $_ := set $limits $root.Values.rdma.resource ($root.Values.rdma.count | toString) }}
        {{- end }}
        {{- if $limits }}
        {{- $_ := set $resources "limits" (merge (default dict $resources.limits) $limits) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: deployment, mountPath: /etc/afd/deployment.yaml, subPath: deployment.yaml, readOnly: true}
        - {name: deployment, mountPath: /etc/afd/run, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - name: model
          mountPath: {{ $root.Values.model.mountPath }}
          readOnly: true
          {{- with $root.Values.model.subPath }}
          subPath: {{ . }}
          {{- end }}
        {{- if .keys }}
        - {name: keys, mountPath: /etc/afd/keys, readOnly: true}
        {{- end }}
        {{- if .data }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- if .public }}
        {{- if $root.Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/afd/api-keys, readOnly: true}
        {{- end }}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: /etc/afd/tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $role.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: deployment
      configMap: {name: {{ include "afd.fullname" $root }}}
    - {name: tmp, emptyDir: {}}
    - name: model
      {{- toYaml $root.Values.model.volume | nindent 6 }}
    {{- if .keys }}
    - name: keys
      secret:
        secretName: {{ $root.Values.keys.existingSecret }}
        defaultMode: 288 # 0440
        items: [{key: {{ $root.Values.keys.key }}, path: control.keys}]
    {{- end }}
    {{- if .data }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.shm.sizeLimit }}}
    {{- end }}
    {{- if .public }}
    {{- with $root.Values.apiKeys }}
    {{- if .existingSecret }}
    - name: api-keys
      secret: {secretName: {{ .existingSecret }}, items: [{key: {{ .key }}, path: api.keys}]}
    {{- end }}
    {{- end }}
    {{- with $root.Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ . }}}
    {{- end }}
    {{- end }}
    {{- with $role.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The numbers that files/*.sh read. (dict "root" . "ranks" 1) */}}
{{- define "afd.indexEnv" -}}
- name: AFD_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ include "afd.indexLabel" .root }}']"}}
- {name: AFD_RANKS, value: {{ .ranks | quote }}}
- {name: AFD_PORT_STEP, value: {{ ternary "1" "0" (and .root.Values.rdma.enabled .root.Values.rdma.hostNetwork) | quote }}}
{{- end -}}

{{/*
The three probes of an instance: (dict "root" . "ready" "/ready" "live" "/live" "port" 9100 "step" 1).
step: ports per instance, for pods that share the network of their node.
*/}}
{{- define "afd.probes" -}}
{{- $facts := include "afd.facts" .root | fromYaml -}}
{{- $starts := div (add (int $facts.startSeconds) (int .root.Values.probes.periodSeconds) -1) (int .root.Values.probes.periodSeconds) -}}
startupProbe:
  {{- include "afd.probe" (dict "root" .root "path" .ready "port" .port "step" .step "failures" $starts) | nindent 2 }}
readinessProbe:
  {{- include "afd.probe" (dict "root" .root "path" .ready "port" .port "step" .step "failures" 2) | nindent 2 }}
livenessProbe:
  {{- include "afd.probe" (dict "root" .root "path" .live "port" .port "step" .step "failures" 12) | nindent 2 }}
{{- end -}}

{{- define "afd.probe" -}}
{{- if and .root.Values.rdma.enabled .root.Values.rdma.hostNetwork -}}
exec: {command: [bash, /etc/afd/run/ready.sh, {{ .path }}, {{ .port | quote }}, {{ .step | quote }}]}
{{- else -}}
httpGet: {path: {{ .path }}, port: {{ .port }}}
{{- end }}
periodSeconds: {{ .root.Values.probes.periodSeconds }}
timeoutSeconds: {{ .root.Values.probes.timeoutSeconds }}
failureThreshold: {{ .failures }}
{{- end -}}
