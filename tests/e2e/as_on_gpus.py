"""Ways of running an engine that vLLM chooses on GPUs, and not on CPUs. In a vLLM environment."""


def schedule_ahead() -> None:
    """Leave asynchronous scheduling on, which vLLM turns off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config.__func__

    def settle_but_that(platform, config):
        settle(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(settle_but_that)


def encode_as_on_gpus() -> None:
    """Have an engine that only encodes run vLLM's second runner for that, as workers on GPUs do."""
    from vllm.v1.worker.cpu import model_runner
    from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

    whole = model_runner.CPUModelRunner
    model_runner.CPUModelRunner = lambda config, device: (
        MMEncoderModelRunner if config.is_mm_encoder_only else whole
    )(config, device)
