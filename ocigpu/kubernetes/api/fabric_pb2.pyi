from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FabricNothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FabricGpus(_message.Message):
    __slots__ = ("physical_ids",)
    PHYSICAL_IDS_FIELD_NUMBER: _ClassVar[int]
    physical_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, physical_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class FabricLinks(_message.Message):
    __slots__ = ("available", "most")
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    available: int
    most: int
    def __init__(self, available: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class FabricPartition(_message.Message):
    __slots__ = ("partition_id", "is_active", "physical_ids", "nvlinks")
    PARTITION_ID_FIELD_NUMBER: _ClassVar[int]
    IS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_IDS_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_FIELD_NUMBER: _ClassVar[int]
    partition_id: int
    is_active: bool
    physical_ids: _containers.RepeatedScalarFieldContainer[int]
    nvlinks: _containers.RepeatedCompositeFieldContainer[FabricLinks]
    def __init__(self, partition_id: _Optional[int] = ..., is_active: _Optional[bool] = ..., physical_ids: _Optional[_Iterable[int]] = ..., nvlinks: _Optional[_Iterable[_Union[FabricLinks, _Mapping]]] = ...) -> None: ...

class FabricPartitions(_message.Message):
    __slots__ = ("partitions",)
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    partitions: _containers.RepeatedCompositeFieldContainer[FabricPartition]
    def __init__(self, partitions: _Optional[_Iterable[_Union[FabricPartition, _Mapping]]] = ...) -> None: ...

class FabricActive(_message.Message):
    __slots__ = ("active", "known")
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    active: _containers.RepeatedCompositeFieldContainer[FabricGpus]
    known: _containers.RepeatedCompositeFieldContainer[FabricPartition]
    def __init__(self, active: _Optional[_Iterable[_Union[FabricGpus, _Mapping]]] = ..., known: _Optional[_Iterable[_Union[FabricPartition, _Mapping]]] = ...) -> None: ...
