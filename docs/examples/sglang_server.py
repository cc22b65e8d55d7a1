"""SGLang as a server, as `serve.engine: sglang`."""

from trainshed.launch.serving_engine import SERVING_ENGINES, ServingEngine


@SERVING_ENGINES.register("sglang")
class SglangServer(ServingEngine):
    """The exported weights on `serve.gpus` GPUs of one node."""

    ready = "/health_generate"
    startup_seconds = 300

    def command(self, recipe, folder, *, drain_seconds):
        """Return the command, without its port."""
        serve = recipe.serve
        words = ["python3", "-m", "sglang.launch_server", "--model-path", folder, "--host", "0.0.0.0"]
        words += ["--served-model-name", recipe.name, "--tp-size", str(serve.gpus)]
        if serve.max_length is not None:
            words += ["--context-length", str(serve.max_length)]
        if serve.max_sequences is not None:
            words += ["--max-running-requests", str(serve.max_sequences)]
        return words + [f"--{name}={value}" for name, value in serve.args.items()]
