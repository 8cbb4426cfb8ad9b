"""Checks which options exclude each other, need each other, or have no meaning for this flow. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn

from cutline.base.redaction import address_without_secrets, has_credentials, without_secrets
from cutline.config.options import OperatorOptions, Options
from cutline.errors import ConfigError

BUCKET_SCHEMES = ("s3://", "gs://", "az://")
#: Names of options that must not be written to our files.
_SECRET = re.compile(r"secret|token|password|credential|access_?key|account_?key|sas", re.IGNORECASE)


def check_options(options: Options, *, flow: str, own: Mapping[str, OperatorOptions]) -> None:
    """Raise ConfigError unless the options fit together and fit the flow.

    ``own``: the operators' own options, from code and configuration.
    """
    unknown = sorted(set(options.operators) - set(own))
    if unknown:
        _refuse(
            f"operators.{unknown[0]}: the flow has no such operator", f"its operators are: {', '.join(own)}", flow=flow
        )
    _check_remote(options, flow)
    _check_spark_dirs(options, flow)
    _check_channel_store(options, flow)
    for name, one in own.items():
        _check_operator(options, one, flow=flow, operator=name)


def _check_remote(options: Options, flow: str) -> None:
    if options.durable == "remote" and not options.remote:
        _refuse("durable: there is no remote tier", 'set remote, or durable = "local"', flow=flow)
    if options.remote and options.is_per_operator:
        _refuse(
            "remote: a checkpoint of a single operator cannot be used on another host",
            "choose another mode, or leave remote out",
            flow=flow,
        )


def _check_spark_dirs(options: Options, flow: str) -> None:
    if "://" in options.spark_dirs and has_credentials(options.spark_dirs):
        _refuse(
            f"spark_dirs: {address_without_secrets(options.spark_dirs)} holds more than a place, and is stored",
            "give credentials in the configuration of Spark's file system",
            flow=flow,
        )
    if options.spark_dirs and "://" not in options.spark_dirs:
        _refuse(
            f"spark_dirs: {without_secrets(options.spark_dirs)!r} is not a URL",
            'write for example "hdfs://host/path"; set a folder that all machines share as storage',
            flow=flow,
        )
    if options.spark_dirs and options.is_per_operator:
        _refuse(
            "spark_dirs: in per-operator mode Spark's directories are in storage",
            "choose another mode, or leave spark_dirs out",
            flow=flow,
        )


def _check_channel_store(options: Options, flow: str) -> None:
    place = options.channel_store.rstrip("/")
    if place and not place.startswith((*BUCKET_SCHEMES, "file://")):
        _refuse(
            f"channel_store: {address_without_secrets(place)!r} is not the URL of an object store",
            'write for example "s3://bucket/prefix"; set a folder that all machines share as storage',
            flow=flow,
        )
    is_bucket = place.startswith(BUCKET_SCHEMES)
    secret = next((name for name in options.remote_options if is_bucket and _SECRET.search(name)), None)
    if secret is not None:
        _refuse(
            f"channel_store: {secret} would have to be written to a file for the executors",
            "give credentials in the environment of the driver and of the executors",
            flow=flow,
        )


def _check_operator(options: Options, own: OperatorOptions, *, flow: str, operator: str) -> None:
    if options.is_per_operator and own.sets_alignment():
        _refuse(
            "mode and alignment_timeout of an operator have no meaning in per-operator mode",
            "leave them out",
            flow=flow,
            operator=operator,
        )
    if own.checkpoint_interval_ms is not None and not options.is_per_operator:
        _refuse(
            "checkpoint_interval of an operator is for per-operator mode: in other modes all operators cut together",
            'set mode = "per-operator" for the flow, or checkpoint_interval for the flow',
            flow=flow,
            operator=operator,
        )
    if own.replicate_interval_ms is not None and options.is_per_operator:
        _refuse(
            "replicate_interval of an operator has no meaning in per-operator mode, which has no remote tier",
            "leave it out",
            flow=flow,
            operator=operator,
        )
    if own.replicate_interval_ms is not None and options.durable == "remote":
        _refuse(
            'replicate_interval of an operator has no meaning with durable = "remote": each checkpoint is uploaded '
            "before it is complete",
            'leave it out, or set durable = "local"',
            flow=flow,
            operator=operator,
        )


def _refuse(what: str, next_step: str, **where: str) -> NoReturn:
    raise ConfigError(what, next_step=next_step, **where)
