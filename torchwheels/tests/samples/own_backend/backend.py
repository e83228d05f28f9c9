"""setuptools, with requirements and a setting of its own."""

import os

from setuptools import build_meta

prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(config_settings=None):
    return ["numpy", "torch>=2"]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    os.environ["ANSWER"] = (config_settings or {})["answer"]
    return build_meta.build_wheel(wheel_directory, None, metadata_directory)
