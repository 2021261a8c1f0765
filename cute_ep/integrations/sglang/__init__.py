"""SGLang's Mixture-of-Experts layers over cute_ep, as a plugin in place of DeepEP V2 (docs/sglang.md)."""

import logging

LOG = logging.getLogger(__name__)
NAME = "cute_ep"
"""Of the plugin, in SGLang's variable SGLANG_PLUGINS."""
REPLACED = "sglang.srt.layers.moe.token_dispatcher.deepep_v2.DeepEPv2Dispatcher"
"""What `--moe-a2a-backend deepep_v2` makes for each layer."""


def plugin() -> None:
    """Entry point of the group `sglang.srt.plugins`, which SGLang calls in each of its processes. If SGLANG_PLUGINS
    names cute_ep, `CuteEPDispatcher` takes the place of DeepEP V2's dispatcher. ImportError: this SGLang is not the
    version that the dispatcher was written for. SGLang logs it as an error, and goes on with DeepEP V2."""
    from sglang.srt.environ import envs

    if NAME not in [name.strip() for name in envs.SGLANG_PLUGINS.get().split(",")]:
        LOG.info("SGLANG_PLUGINS does not name %s: nothing is replaced", NAME)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from cute_ep.integrations.sglang.dispatcher import CuteEPDispatcher

    HookRegistry.register(REPLACED, CuteEPDispatcher, HookType.REPLACE)
    # a warning, since SGLang sets its logs up later, and until then no others are shown
    LOG.warning("%s replaces %s", CuteEPDispatcher.__name__, REPLACED)
