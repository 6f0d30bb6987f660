"""Plans made by hand, for tests of what is said about plans."""

from __future__ import annotations

from autopar.spec.plan import (
    Alternative,
    ClusterFingerprint,
    ModelFingerprint,
    ParameterSlice,
    ParameterSpec,
    Plan,
    Prediction,
    SyncGroup,
)

HIDDEN = "Its all-reduce is hidden behind the rest of the backward pass."
LAYER = (("attn.weight", (64, 192)), ("attn.bias", (192,)), ("mlp.weight", (64, 256)))


def prediction(step_s: float, exposed_s: float = 0.0, error: float = 0.05, provenance: str = "looked up") -> Prediction:
    return Prediction.model_validate(
        {
            "step_time_s": step_s,
            "compute_s": step_s - exposed_s,
            "exposed_communication_s": exposed_s,
            "wire_bytes": 3 * 2**20,
            "peak_memory_bytes": 40 * 2**20,
            "relative_error": error,
            "provenance": provenance,
        }
    )


def whole(name: str) -> ParameterSlice:
    return ParameterSlice(name=name)


def small_plan(num_layers: int = 2) -> Plan:
    """A tied embedding in two slices under two servers, a frozen table, and one all-reduce a layer."""
    embedding = ParameterSpec(name="wte.weight", shape=(4096, 64), dtype="float32", ties=("head.weight",))
    frozen = ParameterSpec(name="wpe.weight", shape=(128, 64), dtype="float32", trainable=False)
    layers = [
        [ParameterSpec(name=f"h.{i}.{name}", shape=shape, dtype="float32") for name, shape in LAYER]
        for i in range(num_layers)
    ]
    groups = [
        SyncGroup(
            strategy="all_reduce",
            members=tuple(whole(p.name) for p in layer),
            options={"wire": "same"},
            reason=HIDDEN,
        )
        for layer in reversed(layers)
    ]
    first = ParameterSlice(name="wte.weight", start=0, stop=1024)
    second = ParameterSlice(name="wte.weight", start=1024, stop=4096)
    groups += [
        SyncGroup(strategy="parameter_server", members=(first,), options={"owner": 0}, reason="A large table."),
        SyncGroup(strategy="parameter_server", members=(second,), options={"owner": 2}, reason="A large table."),
    ]
    return Plan(
        model=ModelFingerprint(
            name="TinyModel", parameters=(embedding, frozen, *(p for layer in layers for p in layer))
        ),
        cluster=ClusterFingerprint(digest="c1", world_size=4, summary="4 hosts x 1 cpu, 1 Gbit/s", spec={}),
        groups=tuple(groups),
        prediction=prediction(0.100, 0.010),
        alternatives=(
            Alternative(name="zero1", prediction=prediction(0.110, 0.020)),
            Alternative(name="ddp", prediction=prediction(0.150, 0.060)),
        ),
    )
