"""Run folders and checkpoints on other storage than folders: S3, GCS, Azure, HDFS, and any file system of pyarrow."""
