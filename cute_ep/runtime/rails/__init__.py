"""Engines that bring mail along a rail (`cute_ep.runtime.mail.Engine`)."""
