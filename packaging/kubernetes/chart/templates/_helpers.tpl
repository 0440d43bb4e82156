{{- define "ocigpu.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Beginning of the names of all objects. */}}
{{- define "ocigpu.name" -}}
{{ .Values.nameOverride | default .Release.Name }}
{{- end -}}

{{/* "yes" where the device plugin reads the driver's files and device nodes of the host itself: for specifications, for
paths that it tells the kubelet (of AMD GPUs also with volume-mounts), for IMEX channels, and where no runtime class
brings them into its pod (then for virtual machines too).  Nobody knows what a configuration of another ConfigMap asks for. */}}
{{- define "ocigpu.hostRoot" -}}
{{- $asked := printf "%s%s" (toYaml .Values.config.files) (toYaml .Values.devicePlugin.args) -}}
{{- if or (contains "cdi" .Values.devicePlugin.deviceListStrategy) (contains "passDeviceSpecs" $asked) (contains "pass-device-specs" $asked) (contains "imex" $asked) (contains "vfio" $asked) (contains "cdi" $asked) (not .Values.runtimeClass.name) .Values.config.existing (and .Values.amd (contains "volume-mounts" .Values.devicePlugin.deviceListStrategy)) -}}
yes
{{- end -}}
{{- end -}}

{{- define "ocigpu.labels" -}}
app.kubernetes.io/name: ocigpu
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "ocigpu.configMap" -}}
{{ .Values.config.existing | default (printf "%s-config" (include "ocigpu.name" .)) }}
{{- end -}}

{{/* Labels that select the pods of one DaemonSet: (dict "root" . "component" "exporter" "config" "") */}}
{{- define "ocigpu.selector" -}}
app.kubernetes.io/name: ocigpu
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- if .config }}
ocigpu/config: {{ .config }}
{{- end }}
{{- end -}}

{{/* The section of the values that belongs to a program of nodes; empty for others. */}}
{{- define "ocigpu.section" -}}
{{ get (dict "device-plugin" "devicePlugin" "dra-driver" "dra" "exporter" "exporter" "node-labels" "nodeLabels" "mps-control-daemon" "mps" "node-installer" "nodeInstaller" "mig-manager" "migManager" "lease-agent" "leases" "compute-domain-driver" "computeDomains") .component }}
{{- end -}}

{{- define "ocigpu.podMetadata" -}}
{{- $own := index .root.Values (include "ocigpu.section" .) | default dict -}}
labels:
  {{- include "ocigpu.selector" . | nindent 2 }}
  {{- with merge (dict) ($own.podLabels | default dict) .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) ($own.podAnnotations | default dict) .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ocigpu.updateStrategy" -}}
{{- toYaml ((index .root.Values (include "ocigpu.section" .)).updateStrategy | default .root.Values.updateStrategy) }}
{{- end -}}

{{/* Variables of the values, after those of the chart; a name in a program's section replaces that of all. */}}
{{- define "ocigpu.extraEnv" -}}
{{- $own := (index .root.Values (include "ocigpu.section" .)).extraEnv | default list -}}
{{- $names := list -}}
{{- range $own }}
{{- if has .name $names }}{{ fail (printf "extraEnv contains %s twice" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end -}}
{{- $all := list -}}
{{- $others := list -}}
{{- range .root.Values.extraEnv }}
{{- if has .name $others }}{{ fail (printf "extraEnv contains %s twice" .name) }}{{ end }}
{{- $others = append $others .name }}
{{- if not (has .name $names) }}{{ $all = append $all . }}{{ end }}
{{- end -}}
{{- with concat $all $own }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* Nodes: the terms of the values, each with what the named configuration and MPS need; then preferences. */}}
{{- define "ocigpu.affinity" -}}
{{- $here := . -}}
{{- $own := index .root.Values (include "ocigpu.section" .) -}}
{{- $affinity := ternary $own.affinity .root.Values.affinity (hasKey $own "affinity") -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      {{- $terms := $own.nodeSelectorTerms | default .root.Values.nodeSelectorTerms }}
      {{- if include "ocigpu.amd" . }}
      {{- /* PCI classes of AMD's accelerators and displays, as node feature discovery writes them by default. */}}
      {{- range $class := list "1200" "0380" "0300" }}
      {{- $key := printf "feature.node.kubernetes.io/pci-%s_1002.present" $class }}
      {{- $term := dict "key" $key "operator" "In" "values" (list "true") }}
      {{- $terms = append $terms (dict "matchExpressions" (list $term)) }}
      {{- end }}
      {{- end }}
      {{- range $term := $terms }}
      - matchExpressions:
          {{- toYaml $term.matchExpressions | nindent 10 }}
          {{- if and $here.config (ne $here.config "default") }}
          - {key: nvidia.com/device-plugin.config, operator: In, values: [{{ $here.config | quote }}]}
          {{- else if and $here.config (gt (len $here.root.Values.config.files) 1) }}
          - key: nvidia.com/device-plugin.config
            operator: NotIn
            values:
              {{- range $name, $text := $here.root.Values.config.files }}
              {{- if ne $name "default" }}
              - {{ $name | quote }}
              {{- end }}
              {{- end }}
          {{- end }}
          {{- if eq $here.component "mps-control-daemon" }}
          - {key: nvidia.com/mps.capable, operator: In, values: ["true"]}
          {{- end }}
          {{- if and $here.root.Values.migManager.enabled (include "ocigpu.client" $here) }}
          - {key: nvidia.com/gpu.deploy.{{ include "ocigpu.client" $here }}, operator: NotIn, values: [paused-for-mig-change]}
          {{- end }}
      {{- end }}
  {{- with $affinity.nodeAffinity }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with omit $affinity "nodeAffinity" }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* "yes" where a program also runs on the nodes with AMD GPUs. */}}
{{- define "ocigpu.amd" -}}
{{- if eq .component "dra-driver" -}}
{{ ternary "yes" "" .root.Values.dra.amd }}
{{- else if has .component (list "device-plugin" "exporter" "node-installer" "node-labels") -}}
{{ ternary "yes" "" .root.Values.amd }}
{{- end -}}
{{- end -}}

{{/* By which label the MIG manager pauses a program: that of NVIDIA's program of the kind; empty for others. */}}
{{- define "ocigpu.client" -}}
{{- if eq .component "exporter" -}}
dcgm-exporter
{{- else if eq .component "node-labels" -}}
gpu-feature-discovery
{{- else if or (eq .component "device-plugin") (eq .component "mps-control-daemon") -}}
{{ .component }}
{{- end -}}
{{- end -}}

{{/* The hook of CDI specifications: that of the package, or of what node-installer has put on the hosts. */}}
{{- define "ocigpu.hook" -}}
{{- if and .Values.nodeInstaller.enabled (eq .Values.host.hook "/usr/bin/ocigpu-hook") -}}
/opt/ocigpu/current/bin/ocigpu-hook
{{- else -}}
{{ .Values.host.hook }}
{{- end -}}
{{- end -}}

{{/* Whether the exporter asks the API server about pods; "" if not. */}}
{{- define "ocigpu.asksForPods" -}}
{{- if and .Values.exporter.enabled .Values.exporter.pods (or .Values.exporter.enablePodLabels .Values.exporter.enablePodUID) }}yes{{ end }}
{{- end -}}

{{/* What all pods have. */}}
{{- define "ocigpu.pod" -}}
{{- $installer := or (eq .component "node-installer") (eq .component "mig-manager") (eq .component "lease-agent") }}
{{- if and .root.Values.runtimeClass.name (not .root.Values.host.simulation) (not $installer) }}
runtimeClassName: {{ .root.Values.runtimeClass.name }}
{{- end }}
{{- $own := index .root.Values (include "ocigpu.section" .) }}
{{- with ternary $own.priorityClassName .root.Values.priorityClassName (hasKey $own "priorityClassName") }}
priorityClassName: {{ . }}
{{- end }}
{{- if ternary $own.hostNetwork .root.Values.hostNetwork (hasKey $own "hostNetwork") }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with merge (dict) ($own.nodeSelector | default dict) .root.Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
serviceAccountName: {{ include "ocigpu.name" .root }}-{{ .component }}
{{- $asks := and (eq .component "exporter") (eq (include "ocigpu.asksForPods" .root) "yes") }}
automountServiceAccountToken: {{ or $installer (eq .component "node-labels") (has .component (list "dra-driver" "compute-domain-driver")) $asks }}
{{- if .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range $secret := .root.Values.image.pullSecrets }}
  - name: {{ $secret }}
  {{- end }}
{{- end }}
{{- if and .root.Values.seLinuxType (not $installer) }}
securityContext:
  seLinuxOptions:
    type: {{ .root.Values.seLinuxType }}
{{- end }}
affinity:
  {{- include "ocigpu.affinity" . | nindent 2 }}
tolerations:
  {{- toYaml (ternary $own.tolerations .root.Values.tolerations (hasKey $own "tolerations")) | nindent 2 }}
{{- end -}}

{{/* Variables of all containers.  The runtime gives the GPUs: all of them, so that MIG devices and losses are seen. */}}
{{- define "ocigpu.env" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: NVIDIA_VISIBLE_DEVICES
  value: all
{{- if include "ocigpu.amd" . }}
- name: AMD_VISIBLE_DEVICES
  value: all
{{- end }}
- name: NVIDIA_DRIVER_CAPABILITIES
  value: {{ if eq .component "mps-control-daemon" }}compute,utility{{ else }}utility{{ end }}
- name: MPS_ROOT
  value: {{ .root.Values.host.mps }}
{{- if and .root.Values.mig (ne .component "mps-control-daemon") }}
- name: NVIDIA_MIG_MONITOR_DEVICES
  value: all
{{- end }}
{{- if .root.Values.host.simulation }}
- name: OCIGPU_CONFIG
  value: {{ .root.Values.host.simulation }}/config.toml
{{- end }}
{{- end -}}

{{/* Rights of a container: (dict "root" . "user" 0 "admin" false); "admin" is CAP_SYS_ADMIN. */}}
{{- define "ocigpu.security" -}}
{{- if .root.Values.host.simulation -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
{{- $admin := or .admin .root.Values.mig -}}
{{- if and .user (not $admin) }}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
{{- else }}
runAsUser: 0
{{- end }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
seccompProfile:
  type: RuntimeDefault
capabilities:
  drop: [ALL]
  {{- if $admin }}
  add: [SYS_ADMIN]
  {{- end }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of a simulated host, of the configuration, and of the request for GPUs on nodes whose runtime
takes none from variables (runtimeClass.volumeMounts, or strategy volume-mounts). */}}
{{- define "ocigpu.mounts" -}}
{{- if .config }}
- name: config
  mountPath: /config
  readOnly: true
{{- end }}
{{- if .root.Values.host.simulation }}
- name: simulation
  mountPath: {{ .root.Values.host.simulation }}
{{- else if or .root.Values.runtimeClass.volumeMounts (contains "volume-mounts" .root.Values.devicePlugin.deviceListStrategy) }}
- name: all-gpus
  mountPath: /var/run/nvidia-container-devices/all
  readOnly: true
{{- end }}
{{- end -}}

{{- define "ocigpu.volumes" -}}
{{- if .config }}
- name: config
  configMap:
    name: {{ include "ocigpu.configMap" .root }}
{{- end }}
{{- if .root.Values.host.simulation }}
- name: simulation
  hostPath:
    path: {{ .root.Values.host.simulation }}
    type: Directory
{{- else if or .root.Values.runtimeClass.volumeMounts (contains "volume-mounts" .root.Values.devicePlugin.deviceListStrategy) }}
- name: all-gpus
  hostPath:
    path: /dev/null
    type: CharDevice
{{- end }}
{{- end -}}

{{/* A match condition: the request makes an object, or changes what policies are about.  An object that is being deleted
is like any other: whoever keeps it by a finalizer may take that away, and change nothing else.  With what else counts
as a change: "EXPRESSION || ". */}}
{{- define "ocigpu.changes" -}}
- name: changes
  expression: >-
    request.operation == 'CREATE' || {{ . }}dyn(object.spec) != dyn(oldObject.spec) ||
    (has(object.metadata.annotations) && (!has(oldObject.metadata.annotations) ||
    object.metadata.annotations != oldObject.metadata.annotations)) ||
    (has(object.metadata.finalizers) && object.metadata.finalizers.exists(f,
    !has(oldObject.metadata.finalizers) || !(f in oldObject.metadata.finalizers)))
{{- end -}}

{{/* CEL: whether a request is of a controller or of the scheduler of the cluster. */}}
{{- define "ocigpu.clusters" -}}
(request.userInfo.username in ['system:kube-controller-manager', 'system:kube-scheduler'] || request.userInfo.username.startsWith('system:serviceaccount:kube-system:'))
{{- end -}}

{{/* CEL: whether a request is of somebody who may change what keeps a tenancy in its place. */}}
{{- define "ocigpu.operator" -}}
(has(request.userInfo.groups) && request.userInfo.groups.exists(g, g in {{ .Values.tenants.operators | toJson }}))
{{- end -}}

{{/* The policy that holds the account of a program of nodes to its own node: roles cannot name one.  The node's name is in
tokens of pods since Kubernetes 1.30.  (dict "root" . "component" "exporter" "policy" "exporter" "group" "" "resources"
"[nodes]" "node" "o.metadata.name" "words" "it ..."); "node" is CEL: the node of an object o, and "" for none.  "labels" and
"annotations": those of the node that it may change; the rest of the node then stays as it is. */}}
{{- define "ocigpu.ownNode" -}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ include "ocigpu.name" .root }}-{{ .policy }}
  labels:
    {{- include "ocigpu.labels" .root | nindent 4 }}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [{{ .group | quote }}]
        apiVersions: ["*"]
        operations: [CREATE, UPDATE, DELETE]
        resources: {{ .resources }}
  matchConditions:
    - name: of-the-account
      expression: {{ include "ocigpu.ofAccount" . }}
  {{- if .labels }}
  variables:
    {{- include "ocigpu.ofNodes" . | nindent 4 }}
  {{- end }}
  validations:
    {{- include "ocigpu.hasNode" . | nindent 4 }}
    - expression: >-
        [object, oldObject].filter(o, o != null).all(o,
        request.userInfo.extra["authentication.kubernetes.io/node-name"] == [{{ .node }}])
      message: {{ .words }}
      reason: Forbidden
    {{- if .labels }}
    {{- include "ocigpu.keepsNode" . | nindent 4 }}
    {{- end }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "ocigpu.name" .root }}-{{ .policy }}
  labels:
    {{- include "ocigpu.labels" .root | nindent 4 }}
spec:
  policyName: {{ include "ocigpu.name" .root }}-{{ .policy }}
  validationActions: [Deny, Audit]
{{- end -}}

{{/* Variables for ocigpu.keepsNode. */}}
{{- define "ocigpu.ofNodes" -}}
{{- range $name := list "labels" "annotations" "finalizers" "ownerReferences" }}
{{- $none := ternary "{}" "[]" (has $name (list "labels" "annotations")) }}
- name: {{ $name }}
  expression: "object != null && has(object.metadata.{{ $name }}) ? object.metadata.{{ $name }} : {{ $none }}"
- name: {{ $name }}Before
  expression: "oldObject != null && has(oldObject.metadata.{{ $name }}) ? oldObject.metadata.{{ $name }} : {{ $none }}"
{{- end }}
{{- end -}}

{{/* The validation that a program changes of a node the labels and annotations that it writes, and nothing else. */}}
{{- define "ocigpu.keepsNode" -}}
- expression: >-
    object != null && oldObject != null && has(object.spec) == has(oldObject.spec) &&
    (!has(object.spec) || object.spec == oldObject.spec) &&
    variables.finalizers == variables.finalizersBefore &&
    variables.ownerReferences == variables.ownerReferencesBefore
    {{- range $name, $keys := dict "labels" .labels "annotations" .annotations }}
    && variables.{{ $name }}.all(k, k in {{ $keys | toJson }} ||
    (k in variables.{{ $name }}Before && variables.{{ $name }}Before[k] == variables.{{ $name }}[k])) &&
    variables.{{ $name }}Before.all(k, k in {{ $keys | toJson }} || k in variables.{{ $name }})
    {{- end }}
  message: {{ .keeps }}
  reason: Forbidden
{{- end -}}

{{- define "ocigpu.ofAccount" -}}
request.userInfo.username == "system:serviceaccount:{{ .root.Release.Namespace }}:{{ include "ocigpu.name" .root }}-{{ .component }}"
{{- end -}}

{{- define "ocigpu.hasNode" -}}
- expression: >-
    has(request.userInfo.extra) && "authentication.kubernetes.io/node-name" in request.userInfo.extra
  message: "the token does not say on which node it is: {{ .words }}"
  reason: Forbidden
{{- end -}}
