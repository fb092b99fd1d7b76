"""Where runs lie: run folders, stores of checkpoints, and both on S3, GCS, Azure, HDFS and any other file system of pyarrow."""
