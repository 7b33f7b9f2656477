"""`echelon plan --prices`: boto3 asks an HTTP server that answers like AWS's price list and EC2."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest

from echelon.cli.main import main
from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.sagemaker.service import refresh_prices
from echelon.planner.hardware.instances import find_instance
from echelon.recipe.yaml_text import read_table

pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")

SPOT = """<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><spotPriceHistorySet>{}\
</spotPriceHistorySet><nextToken>{}</nextToken></DescribeSpotPriceHistoryResponse>"""
ENTRY = "<item><instanceType>{}</instanceType><spotPrice>{}</spotPrice></item>"


def offer(usage, usd):
    """An offer of AWS's price list, as its documentation shows one."""
    term = {"priceDimensions": {"X.Y.Z": {"unit": "Hrs", "pricePerUnit": {"USD": usd}}}}
    attributes = {"servicecode": "AmazonSageMaker", "regionCode": "eu-west-1", "usagetype": usage}
    return json.dumps({"product": {"attributes": attributes}, "terms": {"OnDemand": {"X.Y": term}}})


OFFERS = [
    [offer("EU-Train:ml.p5.48xlarge", "70.5000000000"), offer("EU-Host:ml.g5.xlarge", "9.0")],
    [offer("EU-Train:ml.g5.xlarge", "1.5"), offer("EU-Train:ml.t3.medium", "0.05"), offer("EU-Storage", "0.1")],
]


class Handler(BaseHTTPRequestHandler):
    asked: list
    refuses = False

    def log_message(self, *words):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        target = self.headers.get("X-Amz-Target", "")
        if self.refuses:
            return self.reply(400, json.dumps({"__type": "AccessDeniedException", "message": "not allowed"}))
        if target == "AWSPriceListService.GetProducts":
            question = json.loads(body)
            self.asked.append(question)
            page = int(question.get("NextToken", "0"))
            more = {"NextToken": "1"} if page == 0 else {}
            return self.reply(200, json.dumps({"FormatVersion": "aws_v1", "PriceList": OFFERS[page], **more}))
        question = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        self.asked.append(question)
        entries = (
            [("p5.48xlarge", "20.0"), ("p5.48xlarge", "30.0")]
            if "NextToken" not in question
            else [("g5.xlarge", "0.5")]
        )
        text = SPOT.format("".join(ENTRY.format(*each) for each in entries), "" if "NextToken" in question else "more")
        return self.reply(200, text, "text/xml")

    def reply(self, code, text, kind="application/x-amz-json-1.1"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def aws(tmp_path, monkeypatch):
    handler = type("AwsHandler", (Handler,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    for service in ("PRICING", "EC2"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", f"http://127.0.0.1:{server.server_port}")
    settings = {"AWS_ACCESS_KEY_ID": "of-a-test", "AWS_SECRET_ACCESS_KEY": "of-a-test", "AWS_CONFIG_FILE": "/nowhere"}
    for name, value in {**settings, "AWS_MAX_ATTEMPTS": "1", "ECHELON_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_prices_of_a_region_are_asked_for_and_used_there(aws, tmp_path):
    assert find_instance("p5.48xlarge", region="eu-west-1").price.region == "us-west-2"
    path, priced, on_spot = refresh_prices("eu-west-1", with_spot=True)
    assert (path, priced, on_spot) == (tmp_path / "prices" / "aws-eu-west-1.yaml", 2, 2)
    first, second, spot, _ = aws.asked
    assert first["Filters"] == [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"}]
    assert (first["ServiceCode"], second["NextToken"]) == ("AmazonSageMaker", "1")
    assert spot["Action"] == "DescribeSpotPriceHistory" and "p5.48xlarge" in spot.values()
    on_demand, market = read_table(path)
    assert on_demand["usd_per_hour"] == {"ml.p5.48xlarge": 70.5, "ml.g5.xlarge": 1.5}
    assert market["spot_usd_per_hour"] == {"ml.g5.xlarge": 0.5, "ml.p5.48xlarge": 25.0}
    found = find_instance("p5.48xlarge", region="eu-west-1")
    assert found.price.describe() == f"$70.5/h (eu-west-1, {on_demand['date']})"
    assert found.spot.describe() == f"$25/h (eu-west-1, {on_demand['date']})"
    assert find_instance("p5.48xlarge", region="us-west-2").price.usd_per_hour == 63.296
    assert find_instance("g6.xlarge", region="eu-west-1").price.region == "us-west-2"  # not asked for


def test_a_refusal_leaves_the_prices_of_before(aws, monkeypatch, capsys, tmp_path):
    refresh_prices("eu-west-1", with_spot=False)
    before = (tmp_path / "prices" / "aws-eu-west-1.yaml").read_text()
    aws.refuses = True
    with pytest.raises(LaunchError, match=r"AWS refused asking for the prices of eu-west-1 \(AccessDeniedException\)"):
        refresh_prices("eu-west-1", with_spot=False)
    assert (tmp_path / "prices" / "aws-eu-west-1.yaml").read_text() == before
    with pytest.raises(ConfigError, match="the region is unknown"):
        refresh_prices(None, with_spot=False)
    aws.refuses = False
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setattr("sys.argv", ["echelon", "plan", "--prices", "refresh"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert capsys.readouterr().out == f"prices: 2 types on demand, kept in {tmp_path}/prices/aws-eu-west-1.yaml\n"
