"""A flow as a user's script, which tests hand to ``spark-submit``, ``cutline run`` and a notebook.

Each row of its output names the process in which Spark computed it.
"""

from __future__ import annotations

#: ``{name}``: the flow's; ``{folder}``: for input and output.
DEFINITION = '''
import os
from pathlib import Path
from pyspark.sql import functions as F
from pyspark.sql.types import StringType
from cutline import Flow, sinks

FOLDER = Path("{folder}")
flow = Flow("{name}")


def whereabouts():
    """The JVM above this Python worker: an executor of a cluster, or the driver."""
    daemon = int(Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1])
    words = [word.decode() for word in Path(f"/proc/{{daemon}}/cmdline").read_bytes().split(bytes(1))]
    if "org.apache.spark.executor.CoarseGrainedExecutorBackend" not in words:
        return "driver"
    import cutline
    name, host = words[words.index("--executor-id") + 1], words[words.index("--hostname") + 1]
    return f"executor {{name}} on {{host}} with {{Path(cutline.__file__).parents[1].name}}"


@flow.operator()
def orders(spark):
    return spark.readStream.schema("id long").json(str(FOLDER / "in"))


@flow.operator(inputs=[orders])
def placed(orders):
    return orders.withColumn("place", F.udf(whereabouts, StringType())())


flow.sink(placed, sinks.Parquet(FOLDER / "out" / "{name}"), name="placed")
'''

#: What a script adds in order to run it; it prints what it was.
MAIN = """
import json

if __name__ == "__main__":
    run = flow.start(storage=str(FOLDER / "storage"), checkpoint_interval=0)
    run.process_all_available()
    run.stop()
    from pyspark.sql import SparkSession
    session = SparkSession.getActiveSession()
    print("TOLD " + json.dumps(dict(session.sparkContext.getConf().getAll())))
"""
