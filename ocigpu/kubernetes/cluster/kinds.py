"""Which revision of its kinds this ocigpu works with: a cluster may have those of an earlier chart.

The kinds are in packaging/kubernetes/chart/kinds; a test holds their contents to these numbers.
"""

REVISION = "ocigpu.io/kind-revision"
"""Annotation of a CustomResourceDefinition."""
KINDS = {"gpuleases.ocigpu.io": 1, "tenancies.ocigpu.io": 1}
