"""The streaming sources that Cutline provides, for the engine to register. Imports pyspark through the readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from cutline.connectors.generator.rows import KIND as GENERATOR
from cutline.connectors.generator.rows import settings_of
from cutline.connectors.generator.spark_reader import GeneratorSource
from cutline.connectors.kafka.positions import KIND as KAFKA
from cutline.connectors.kafka.spark_connector import ADDRESS_OPTION, encoded_subscription
from cutline.connectors.kafka.spark_connector import FORMAT as SPARK_KAFKA
from cutline.connectors.kafka.spark_reader import KafkaSource
from cutline.connectors.nats.positions import KIND as NATS
from cutline.connectors.nats.spark_reader import NatsSource
from cutline.connectors.postgres.positions import KIND as POSTGRES
from cutline.connectors.postgres.spark_reader import PostgresSource
from cutline.errors import ConfigError

SOURCES = (GeneratorSource, KafkaSource, NatsSource, PostgresSource)


def _generator_settings(options: Mapping[str, str]) -> bytes:
    try:
        return msgspec.json.encode(settings_of(options))
    except ValueError as error:
        raise ConfigError(
            f"{GENERATOR}: {error}", next_step="correct the option; docs/sources.md lists them all"
        ) from error


#: By format: encodes the options (with lower-case names) that the source's guard must know. Other sources need none.
SETTINGS: Mapping[str, Callable[[Mapping[str, str]], bytes]] = {
    GENERATOR: _generator_settings,
    SPARK_KAFKA: encoded_subscription,
}
#: By format: the option that names the server.
ADDRESS_OPTIONS: Mapping[str, str] = {
    KAFKA: "servers",
    NATS: "url",
    POSTGRES: "url",
    SPARK_KAFKA: ADDRESS_OPTION,
}
