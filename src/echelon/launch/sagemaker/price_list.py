"""Prices of SageMaker's training machines from AWS's price list, and of spot machines from EC2's price history."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.extras import missing_package
from echelon.ground.stored import write_text
from echelon.launch.sagemaker.service import explained
from echelon.planner.hardware.instances import INSTANCES
from echelon.planner.hardware.price_files import find_price_folder
from echelon.recipe.yaml_text import render_yaml

# The price list is served by a few regions only, for all of them.
_SERVED_IN = "us-east-1"
_TRAINING = re.compile(r"(?:^|-)Train:(ml\.\S+)$")
_SPOT_DAYS = 7


def refresh_prices(region: str | None, with_spot: bool) -> tuple[Path, int, int]:
    """Ask AWS for the prices of a region (default: that of the account's configuration), and keep them in a file.

    The caller needs `pricing:GetProducts`, and for spot machines `ec2:DescribeSpotPriceHistory`. Plans then use these
    prices. Returns the file, and the numbers of types with a price on demand and with one of spot machines.

    Raises ConfigError without boto3 or a region, and LaunchError if AWS refuses; then the prices of before stay.
    """
    try:
        import boto3
    except ImportError:
        raise missing_package("--prices", "boto3", "sagemaker") from None
    session = boto3.Session()
    if (region := region or session.region_name) is None:
        raise ConfigError(
            "--prices: the region is unknown; name a recipe with launch.sagemaker.region, or set AWS_DEFAULT_REGION."
        )
    with explained(f"asking for the prices of {region}"):
        pricing = session.client("pricing", region_name=_SERVED_IN)
        prices = dict(_read_price_list(pricing, region))
    if not prices:
        raise LaunchError(f"AWS's price list has no training machine in {region}; correct launch.sagemaker.region.")
    date = datetime.now(UTC).date().isoformat()
    rows = [_row(region, date, "AWS price list, training rate", usd_per_hour=prices)]
    spot: dict[str, float] = {}
    if with_spot:
        with explained(f"asking for the spot prices of {region}"):
            spot = _read_spot_prices(session.client("ec2", region_name=region), list(prices))
        rows.append(_row(region, date, f"mean of EC2's spot prices of {_SPOT_DAYS} days", spot_usd_per_hour=spot))
    folder = find_price_folder()
    path = folder / f"aws-{region}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, render_yaml(rows))
    except OSError as error:
        raise LaunchError(f"the prices cannot be kept in {folder} ({error}); set ECHELON_CACHE.") from error
    return path, len(prices), len(spot)


def _row(region: str, date: str, source: str, **prices: dict[str, float]) -> dict[str, Any]:
    return {"region": region, "date": date, "source": source, **prices}


def _read_price_list(pricing: Any, region: str) -> Iterator[tuple[str, float]]:
    """The types of the catalogue, with dollars per hour on demand."""
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}]
    for page in pricing.get_paginator("get_products").paginate(ServiceCode="AmazonSageMaker", Filters=filters):
        for text in page["PriceList"]:
            offer = json.loads(text)
            match = _TRAINING.search(offer["product"]["attributes"].get("usagetype", ""))
            if match is None or match[1] not in INSTANCES:
                continue
            for term in offer["terms"].get("OnDemand", {}).values():
                for part in term["priceDimensions"].values():
                    if (usd := float(part["pricePerUnit"].get("USD", 0))) > 0:
                        yield match[1], usd


def _read_spot_prices(ec2: Any, names: list[str]) -> dict[str, float]:
    """The mean price of each type that EC2 has, over the last days and all zones."""
    by_type: dict[str, list[float]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        Filters=[{"Name": "instance-type", "Values": [name.removeprefix("ml.") for name in names]}],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC) - timedelta(days=_SPOT_DAYS),
    )
    for page in pages:
        for entry in page["SpotPriceHistory"]:
            by_type.setdefault(f"ml.{entry['InstanceType']}", []).append(float(entry["SpotPrice"]))
    return {name: round(fmean(prices), 4) for name, prices in sorted(by_type.items())}
