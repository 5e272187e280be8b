"""Serves a model with FastAPI, answers requests that make a NaN with the module that made it, and shows metrics.

    python examples/fastapi_server.py --port 8000
    curl 'http://127.0.0.1:8000/predict?x=1&x=2'
    curl 'http://127.0.0.1:8000/predict?x=3e38&x=3e38'
    curl http://127.0.0.1:8000/metrics/

One block around the life of the process sees the requests of all threads. If the process is killed, the last calls are
in the folder `--flights`, where `opintercept show` reads them.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Annotated

import prometheus_client
import torch
import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse
from torch import nn

from opintercept import NonFiniteError, hooks, intercept, runs
from opintercept.integrations.prometheus import Exporter

app = FastAPI()
app.mount("/metrics", prometheus_client.make_asgi_app())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1)).eval()


@app.get("/predict")
def predict(x: Annotated[list[float], Query(min_length=2, max_length=2)]) -> dict[str, float]:
    """What the model says of two numbers."""
    with torch.inference_mode():
        return {"y": model(torch.tensor([x])).item()}


@app.exception_handler(NonFiniteError)
def overflow(request: Request, error: NonFiniteError) -> JSONResponse:
    """Say which module could not compute with the numbers."""
    return JSONResponse({"detail": str(error).splitlines()[0]}, status_code=422)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--flights", type=Path, default=Path("flights"), help="folder for the last calls")
    arguments = parser.parse_args()

    profile = hooks.Profile()
    search = hooks.NonFinite(inf=True)
    flight = runs.RunRecorder(arguments.flights / f"process-{os.getpid()}", "none", flight=1000)
    Exporter([profile, search])
    with intercept([profile, flight, search], threads="all"):
        uvicorn.run(app, port=arguments.port)
    print(profile)


if __name__ == "__main__":
    main()
