"""Trees of a Jetson's files, which tests write below a folder and read as its root."""

from pathlib import Path

MODES = """
< PARAM TYPE=FILE NAME=CPU_ONLINE >
< POWER_MODEL ID=0 NAME=15W >
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< PM_CONFIG DEFAULT=1 >
"""

ORIN_NANO = {
    "proc/device-tree/model": "NVIDIA Jetson Orin Nano Engineering Reference "
    "Developer Kit Super\0",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005-super\0"
    "nvidia,p3767-0005\0nvidia,tegra234\0",
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: "
    "generic, EABI: aarch64, DATE: Wed Jan  8 01:49:37 UTC 2025\n",
    "var/lib/nvpmodel/status": "pmode:0001\n",
    "etc/nvpmodel.conf": MODES,
    "usr/local/cuda/version.json": '{"cuda": {"version": "12.6.68"}}',
    "usr/lib/aarch64-linux-gnu/libnvinfer.so.10": "",
    "usr/lib/aarch64-linux-gnu/libnvinfer.so.10.3.0": "",
    "proc/meminfo": "MemTotal:        7802900 kB\nMemFree: 1 kB\n"
    "MemAvailable:    5402900 kB\nSwapTotal:       3901440 kB\n",
    "sys/class/devfreq/17000000.gpu/cur_freq": "306000000\n",
    "sys/class/devfreq/17000000.gpu/max_freq": "1020000000\n",
}

THOR = {
    "proc/device-tree/model": "NVIDIA Jetson AGX Thor Developer Kit\0",
    "proc/device-tree/compatible": "nvidia,p4071-0000+p3834-0008\0nvidia,tegra264\0",
    "etc/nv_tegra_release": "# R39 (release), REVISION: 2.0, GCID: 1, BOARD: generic\n",
}

RAILS = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
POWER = {f"{RAILS}/in1_label": "VDD_IN\n", f"{RAILS}/in1_input": "5000\n"}
POWER |= {f"{RAILS}/curr1_input": "2000\n", f"{RAILS}/in2_label": "VDD_CPU_GPU_CV\n"}
POWER |= {f"{RAILS}/in2_input": "5000\n", f"{RAILS}/curr2_input": "800\n"}
POWER |= {f"{RAILS}/in7_label": "sum of shunt voltages\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root
