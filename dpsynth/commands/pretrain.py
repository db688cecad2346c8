"""`dpsynth pretrain`: learn the code space and the prior from public data."""

from dpsynth.commands import _options as opt
from dpsynth.console import result


def pretrain(run: opt.Run, threads: opt.Threads = None, json: opt.Json = False) -> None:
    """Learn the code space, the prior and the calibrations from public images; spends nothing.

    Example: dpsynth pretrain runs/digits
    """
    opt.use_threads(threads)
    from dpsynth.planning.verify import load_verified

    verified = load_verified(run)

    from dpsynth.public.pretrain import pretrain as library_pretrain

    facts = library_pretrain(verified)
    text = f"radius {facts['radius']:.4g}, tau {facts['tau']:.3g}: {verified.run.calibration}"
    result({"calibration": str(verified.run.calibration), **facts}, json, text)
    opt.say_next(verified)
