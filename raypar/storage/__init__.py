"""Run folders and checkpoints on S3, GCS, Azure, HDFS and any other file system of pyarrow."""
