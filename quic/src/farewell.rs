//! The packet that tells a peer that we closed. Nobody repeats it once the socket is gone, and any
//! datagram may be lost: so it is kept, to be repeated.

use quinn_proto::Transmit;

use crate::hub::Hub;

pub struct Farewell {
    transmit: Transmit,
    contents: Vec<u8>,
}

impl Farewell {
    pub fn of(transmit: &Transmit, contents: &[u8]) -> Self {
        let transmit = Transmit {
            destination: transmit.destination,
            ecn: transmit.ecn,
            size: transmit.size,
            segment_size: transmit.segment_size,
            src_ip: transmit.src_ip,
        };
        Farewell {
            transmit,
            contents: contents.to_vec(),
        }
    }

    pub fn send(&self, hub: &mut Hub) {
        hub.send(&self.transmit, &self.contents);
    }
}
