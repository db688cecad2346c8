"""`dpsynth pretrain`: learn the code space and the prior from public data."""

from typing import Any

from dpsynth.commands import _options as opt
from dpsynth.commands._ranks import ranks_of, verified_on
from dpsynth.console import result


def pretrain(
    run: opt.Run,
    *,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    offload: opt.Offload = False,
    batch: opt.Batch = None,
    json: opt.Json = False,
) -> None:
    """Learn the code space, the prior and the calibrations from public images; spends nothing.

    Example: dpsynth pretrain runs/digits
    """
    opt.use_workers(workers)
    opt.use_machine(device, dtype, offload, batch)
    with ranks_of(threads) as ranks:
        verified = verified_on(ranks, run)

        from dpsynth.public.pretrain import pretrain as library_pretrain

        # One process: the files must not depend on how many there are.
        facts = ranks.lead(lambda: library_pretrain(verified))
        if facts is not None:
            text = f"{_found(facts)}: {verified.run.calibration}"
            result({"calibration": str(verified.run.calibration), **facts}, json, text)
            opt.say_next(verified)


def _found(facts: dict[str, Any]) -> str:
    """What a calibration says, in a few words."""
    if "radius" in facts and "tau" not in facts:
        return f"radius {facts['radius']:.4g} of {facts['dim']:,} numbers"
    if "radius" in facts:
        return f"radius {facts['radius']:.4g}, tau {facts['tau']:.3g}"
    if "feature_map" in facts:
        return f"{facts['feature_map']['kind']} features, {facts['dim']:,} of an image"
    return f"{sum(facts['tokens']['counts'])} tokens, {facts['tokens']['private']} of them private"
