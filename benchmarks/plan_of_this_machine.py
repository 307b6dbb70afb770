"""What the planner predicts for a decode step on this machine, beside what the engine then takes: both measured here
and now, so run it when nothing else runs. The aim is 25%.

    scripts/bench plan_of_this_machine [--contexts 64,1024]
"""

from __future__ import annotations

import argparse

from kvarn import LLM
from kvarn.bench import engine_speed
from kvarn.planner.api import plan
from kvarn.planner.roofline import Device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="64,1024")
    contexts = [int(c) for c in parser.parse_args().contexts.split(",")]
    device = Device("here", 2**34, 1e10, {"f32": 1e11}, accelerator=False, measured=True, kvarn=engine_speed.measure())
    for name in ("smollm2-135m", "gemma3-270m"):
        engine = LLM(name, context_tokens=2048, prefix_caching=False).engine
        for context in contexts:
            predicted_s = plan(name, device, context=context).time.decode_s_per_token
            measured_s = engine_speed.timed(engine, context).step_s
            figures = f"predicted {predicted_s * 1e3:6.2f} ms  measured {measured_s * 1e3:6.2f} ms"
            print(f"{name:14} {context:5} tokens  {figures}  {predicted_s / measured_s:.2f}x")


if __name__ == "__main__":
    main()
